"""Counts of calls by kind and line of code, at the cost of a dictionary look-up."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from flatout.observe.lanes import Lanes
from flatout.observe.observation import Call, Site
from flatout.observe.sites import is_users, site_of, users_frame

# Kinds of set-up calls, which are counted even before the first step.
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


# Kinds of calls that are attributed to the line of the training loop.
_OF_LOOP = ("print", "log", "metric")


# _STEADY_AFTER: successive calls from one user's line through the same library instruction, after
# which the line is searched less often; _STEADY_FOR: calls per search from then on. A search takes
# several times as long as counting.
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
    """An instruction of a library, with the user's line that last reached it."""

    __slots__ = ("entry", "same", "spared")

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        self.same = self.spared = 0


class Calls:
    """Counts of calls by kind and instruction.

    Attributes:
        loops: code objects that call an optimizer's step.
        noted: number of all calls that were counted.
        passed: number of calls that could have copied to another device, but did not.
        sought: number of those calls for which the stack was searched for the user's line.
        steady_after: number of successive calls from one line, after which the stack is searched
            for the line less often.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._entries: dict[tuple[str, int, int], _Entry] = {}
        self._steady: dict[tuple[str, int, int], _Steady] = {}
        self._of_lines: dict[tuple[str, Site | None], _Entry] = {}
        self._codes: list[CodeType] = []
        self._windows: dict[str, tuple[int, int | None]] = {}
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
        """Count a call of `ns` on `size` bytes, made by the frame `depth` frames above this one."""
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
        self._codes.append(frame.f_code)  # kept alive, so that no other object gets its id
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
        """Return the number of counted calls of this kind, from all lines or from `line` alone."""
        if line is not None:
            entry = self._of_lines.get((kind, line))
            return 0 if entry is None else entry.count
        return sum(entry.count for entry in self._of_lines.values() if entry.kind == kind)

    def forget(self) -> None:
        """Drop the counts from before the first step, which is where the observation begins.

        The counts of set-up calls stay, but their time belongs to no step.
        """
        for entry in self._of_lines.values():
            if entry.kind in _OF_SETUP:
                entry.ns = 0
            else:
                entry.forget()
        self.noted = self.passed = self.sought = 0

    def renew(self) -> None:
        """Begin to count again."""
        Calls.__init__(self, self._lanes)

    def spread(self, kind: str, window: int, since: int | None = None) -> None:
        """Extrapolate the counts of this kind to all steps.

        Args:
            kind: kind of the calls.
            window: number of steps in which the calls were counted.
            since: step from which on the calls are counted again, in addition to the steps of
                `window`.
        """
        self._windows[kind] = window, since

    @property
    def noted_once(self) -> int:
        """Number of counted calls of kinds that are no longer counted."""
        return sum(entry.count for entry in self._no_longer_watched())

    @property
    def sought_once(self) -> int:
        """Number of calls in `noted_once` for which the stack was searched for the user's line."""
        return sum(entry.sought for entry in self._no_longer_watched())

    def _no_longer_watched(self) -> list[_Entry]:
        return [entry for entry in self._of_lines.values() if entry.kind in self._windows]

    def all(self) -> list[Call]:
        """Return one Call for each kind and user's line, in order of decreasing time."""
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
