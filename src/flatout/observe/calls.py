"""Calls of one kind from one place, counted at the price of a dictionary look-up."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from flatout.observe.lanes import Lanes
from flatout.observe.observation import Call, Site
from flatout.observe.sites import site_of


class _Entry:
    __slots__ = ("code", "count", "detail", "kind", "last", "ns", "site", "steps")

    def __init__(self, kind: str, code: CodeType, site: Site | None, detail: dict[str, Any]):
        self.kind = kind
        self.code = code  # held, so that its id stays its own
        self.site = site
        self.detail = detail
        self.forget()

    def forget(self) -> None:
        self.count = self.steps = self.ns = 0
        self.last = -1


class Calls:
    """What was called, by kind and instruction."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._entries: dict[tuple[str, int, int], _Entry] = {}
        self.noted = 0

    def note(
        self, kind: str, ns: int, depth: int = 2, detail: dict[str, Any] | None = None
    ) -> None:
        """Counts a call of `ns` that the frame `depth` above this one has made."""
        frame = sys._getframe(depth)
        code = frame.f_code
        key = (kind, id(code), frame.f_lasti)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(kind, code, site_of(frame), detail or {})
        entry.count += 1
        entry.ns += ns
        step = self._lanes.steps
        if entry.last != step:
            entry.last = step
            entry.steps += 1
        self.noted += 1

    def forget(self) -> None:
        """Drops the counts: what came before the first step is no part of what is observed."""
        for entry in self._entries.values():
            entry.forget()
        self.noted = 0

    def all(self) -> list[Call]:
        """One Call for each kind and user's line, most time first."""
        merged: dict[tuple[str, Site], Call] = {}
        for entry in list(self._entries.values()):
            if not entry.count or entry.site is None:
                continue
            key = (entry.kind, entry.site)
            call = merged.setdefault(key, Call(entry.kind, entry.site, seconds=0.0))
            call.count += entry.count
            call.seconds = (call.seconds or 0.0) + entry.ns / 1e9
            call.steps = max(call.steps, entry.steps)
            call.detail.update(entry.detail)
        return sorted(merged.values(), key=lambda call: -(call.seconds or 0.0))
