"""Calls of one kind from one place, counted at the price of a dictionary look-up."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from flatout.observe.lanes import Lanes
from flatout.observe.observation import Call, Site
from flatout.observe.sites import is_users, site_of, users_frame

# What belongs to the set-up, and counts although no step has begun.
_OF_SETUP = (
    "data_parallel",
    "ddp",
    "device_count",
    "no_sync",
    "optimizer",
    "set_epoch",
    "setenv",
    "switch",
    "threads",
)


# What is told by the loop's own line.
_OF_LOOP = ("print", "log", "metric")


# A library's instruction that the user's same line has reached so often is asked for its line only
# once in so many calls: finding it takes several times as long as counting.
_STEADY_AFTER, _STEADY_FOR = 100, 16


class _Entry:
    __slots__ = ("bytes", "count", "detail", "kind", "last", "ns", "site", "sought", "steps")

    def __init__(self, kind: str, site: Site | None, detail: dict[str, Any]):
        self.kind = kind
        self.site = site
        self.detail = dict(detail)
        self.forget()

    def forget(self) -> None:
        self.count = self.steps = self.ns = self.bytes = self.sought = 0
        self.last = -1


class _Steady:
    """An instruction of a library, and the user's line that reaches it."""

    __slots__ = ("entry", "same", "spared")

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        self.same = self.spared = 0


class Calls:
    """What was called, by kind and instruction.

    Attributes:
        noted: how many calls, of all kinds.
        passed: how many that could have copied to another device, and have not.
        sought: for how many of those noted the user's line had to be looked for.
        steady_after: after how many calls in a row from the same line it is looked for less often.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._entries: dict[tuple[str, int, int], _Entry] = {}
        self._steady: dict[tuple[str, int, int], _Steady] = {}
        self._of_lines: dict[tuple[str, Site | None], _Entry] = {}
        self._codes: list[CodeType] = []
        self._windows: dict[str, tuple[int, int | None]] = {}
        # Functions that call an optimizer's step.
        self.loops: set[CodeType] = set()
        self.steady_after = _STEADY_AFTER
        self.noted = self.passed = self.sought = 0

    def note(
        self,
        kind: str,
        ns: int,
        depth: int = 2,
        detail: dict[str, Any] | None = None,
        size: int = 0,
    ) -> None:
        """Counts a call of `ns`, on `size` bytes, that the frame `depth` above this has made."""
        frame = sys._getframe(depth)
        key = (kind, id(frame.f_code), frame.f_lasti)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._searched(key, frame, detail or {})
        entry.count += 1
        entry.ns += ns
        entry.bytes += size
        step = self._lanes.steps
        if entry.last != step:
            entry.last = step
            entry.steps += 1
        self.noted += 1

    def _searched(
        self, key: tuple[str, int, int], frame: FrameType, detail: dict[str, Any]
    ) -> _Entry:
        steady = self._steady.get(key)
        if steady is not None and steady.spared:
            steady.spared -= 1
            return steady.entry
        kind = key[0]
        entry = self._entry_of(kind, frame, detail)
        self.sought += 1
        entry.sought += 1
        is_known = kind not in _OF_LOOP or frame.f_code in self.loops
        if is_known and is_users(frame.f_code.co_filename):
            self._entries[key] = entry
        elif steady is None:
            self._steady[key] = _Steady(entry)
        else:
            steady.same = steady.same + 1 if steady.entry is entry else 0
            steady.entry = entry
            if steady.same >= self.steady_after:
                steady.spared = _STEADY_FOR - 1
            return entry
        self._codes.append(frame.f_code)  # held, so that its id stays its own
        return entry

    def _entry_of(self, kind: str, frame: FrameType | None, detail: dict[str, Any]) -> _Entry:
        frame = users_frame(frame)
        outer = frame if kind in _OF_LOOP else None
        while outer is not None and is_users(outer.f_code.co_filename):
            if outer.f_code in self.loops:
                frame = outer
                break
            outer = outer.f_back
        site = site_of(frame)
        entry = self._of_lines.get((kind, site))
        if entry is None:
            entry = self._of_lines[kind, site] = _Entry(kind, site, detail)
        entry.detail.update(detail)
        return entry

    def count(self, kind: str, line: Site | None = None) -> int:
        """How many of this kind were noted, by all lines or this one."""
        if line is not None:
            entry = self._of_lines.get((kind, line))
            return 0 if entry is None else entry.count
        return sum(entry.count for entry in self._of_lines.values() if entry.kind == kind)

    def forget(self) -> None:
        """Drops the counts: what came before the first step is no part of what is observed.

        Of the set-up the counts stay, but its time is that of no step.
        """
        for entry in self._of_lines.values():
            if entry.kind in _OF_SETUP:
                entry.ns = 0
            else:
                entry.forget()
        self.noted = self.passed = self.sought = 0

    def renew(self) -> None:
        """Begins to count."""
        Calls.__init__(self, self._lanes)

    def spread(self, kind: str, window: int, since: int | None = None) -> None:
        """Calls of this kind were watched in so many steps only; they are told as if in all."""
        self._windows[kind] = window, since

    @property
    def noted_once(self) -> int:
        """How many were noted of kinds that are no longer watched."""
        return sum(entry.count for entry in self._no_longer_watched())

    @property
    def sought_once(self) -> int:
        """For how many of these the user's line had to be looked for."""
        return sum(entry.sought for entry in self._no_longer_watched())

    def _no_longer_watched(self) -> list[_Entry]:
        return [entry for entry in self._of_lines.values() if entry.kind in self._windows]

    def all(self) -> list[Call]:
        """One Call for each kind and user's line, most time first."""
        steps = self._lanes.steps
        result = []
        for entry in list(self._of_lines.values()):
            if not entry.count or entry.site is None:
                continue
            call = Call(entry.kind, entry.site, entry.count, entry.ns / 1e9, entry.steps)
            call.detail = dict(entry.detail)
            if entry.bytes:
                call.detail["bytes"] = entry.bytes // entry.count
            window, since = self._windows.get(entry.kind, (0, None))
            if window:
                window += 0 if since is None else steps - since
                factor = max(1.0, steps / window)
                call.count = round(call.count * factor)
                call.seconds = factor * entry.ns / 1e9
                call.steps = min(steps, round(call.steps * factor))
                call.detail["watched_steps"] = window
            result.append(call)
        return sorted(result, key=lambda call: -(call.seconds or 0.0))
