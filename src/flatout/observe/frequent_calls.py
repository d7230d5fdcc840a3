"""Calls that are timed in all steps, or in the first ones where that costs too much of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.lanes import HOST
from flatout.observe.watch import Watch

# Timing may take so much of the time. That is weighed after so many steps, and again after twice
# as many.
_MOST_SHARE, _WEIGHED = 0.002, 25


class _Place(NamedTuple):
    """A function whose calls are timed, and what wraps it."""

    owner: Any
    name: str
    kind: str
    around: Callable[..., Any]
    given: tuple[Any, ...]


class FrequentCalls:
    """Times calls by kinds: those of the first steps stand for all where a kind comes too often.

    Args:
        watch: gets the calls.
        most_ns: that timing may take of a step, where that is more than its share of the time.
        call_ns: that it takes for each call.
        lane: whose time the calls are.

    Attributes:
        shifted: gets the ns that were taken out of another lane, by kind and lane.
    """

    def __init__(self, watch: Watch, most_ns: int, call_ns: int, lane: int = HOST) -> None:
        self._watch, self._most_ns, self._call_ns = watch, most_ns, call_ns
        self._lane = lane
        self.shifted: Counter[tuple[str, int]] = Counter()
        self._places: list[_Place] = []
        self._hooks: dict[int, Hook] = {}
        watch.on_renewal.append(self._begin)
        watch.at(_WEIGHED, self.weigh)

    def time(
        self, owner: Any, name: str, kind: str, around: Callable[..., Any], *given: Any
    ) -> None:
        """Wrap a function, by `around` and what it is given, as of this kind."""
        self._places.append(_Place(owner, name, kind, around, given))
        self._wrap(len(self._places) - 1)

    def _wrap(self, number: int) -> None:
        place = self._places[number]
        self._hooks[number] = wrap(place.owner, place.name, "observe", place.around, *place.given)

    def _begin(self) -> None:
        self.shifted.clear()
        for number in range(len(self._places)):
            if number not in self._hooks:
                self._wrap(number)

    def weigh(self) -> None:
        """Let the steps so far stand for all, of kinds that came too often in them."""
        watch, lanes = self._watch, self._watch.lanes
        steps = lanes.steps
        most = max(_MOST_SHARE * sum(lanes.spent), self._most_ns * steps) / self._call_ns
        for kind in sorted({self._places[number].kind for number in self._hooks}):
            count = watch.calls.count(kind)
            if count > most and not is_anything_compiled():  # it would be compiled again
                self._end(kind)
                watch.notes[
                    f"{kind}: {count / steps:.0f} calls a step are too many to time in each; "
                    f"the first {steps} steps stand for all"
                ] = None
        watch.at(2 * steps, self.weigh)

    def _end(self, kind: str) -> None:
        for number in [number for number in self._hooks if self._places[number].kind == kind]:
            if not self._hooks[number].remove():
                return  # another package has wrapped it since
            del self._hooks[number]
        steps = self._watch.lanes.steps
        self._watch.calls.spread(kind, steps)
        for (of, lane), ns in self.shifted.items():
            if of == kind and lane != self._lane:
                self._watch.lanes.takes_each_step(ns / steps, lane, self._lane)

    def remove(self) -> None:
        """Take all wrappers off."""
        for hook in self._hooks.values():
            hook.remove()
