"""Timing of frequent calls, in all steps or, where that costs too much, only in some steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.lanes import HOST, Unseen
from flatout.observe.watch import Watch

# _MOST_NS: ns per step that timing one kind of calls may always take, whatever the share; _CALL_NS:
# ns to time one call.
_MOST_NS, _CALL_NS = 1_000, 3_000
# _WEIGHED: step of the first check of that cost, repeated at twice the step each time; _WINDOW:
# number of steps in which an untimed kind is timed again after a check.
_WEIGHED, _WINDOW = 25, 10


class _Place(NamedTuple):
    """A function whose calls are timed, and its wrapper."""

    owner: Any
    name: str
    kind: str
    around: Callable[..., Any]
    given: tuple[Any, ...]


class FrequentCalls:
    """Timer of calls by kind. For kinds that are too frequent, some steps represent all.

    Attributes:
        most_share: largest share of the time that timing a kind of calls may take.
        shifted: ns that were moved out of another lane, by kind of calls and lane.
    """

    def __init__(self, watch: Watch, lane: int = HOST) -> None:
        self._watch = watch
        self._lane = lane
        self.most_share = 0.001
        self.shifted: Counter[tuple[str, int]] = Counter()
        self._places: list[_Place] = []
        self._hooks: dict[int, Hook] = {}
        # By kind that is not timed in each step: the number of steps in which it was timed, and the
        # time of other lanes that its calls take in the remaining steps.
        self._watched: dict[str, int] = {}
        self._unseen: dict[str, list[Unseen]] = {}
        watch.on_renewal.append(self._begin)
        watch.at(_WEIGHED, self.weigh)

    def time(
        self, owner: Any, name: str, kind: str, around: Callable[..., Any], *given: Any
    ) -> None:
        """Wrap a function by `around` with arguments `given`, to time its calls as this kind."""
        self._places.append(_Place(owner, name, kind, around, given))
        self._wrap(len(self._places) - 1)

    def _wrap(self, number: int) -> None:
        place = self._places[number]
        self._hooks[number] = wrap(place.owner, place.name, "observe", place.around, *place.given)

    def _begin(self) -> None:
        self.shifted.clear()
        self._watched.clear()
        self._unseen.clear()
        for number in range(len(self._places)):
            if number not in self._hooks:
                self._wrap(number)

    def weigh(self) -> None:
        """Stop timing kinds that are too frequent, and time stopped kinds again for a few steps."""
        steps = self._watch.lanes.steps
        self._watch.at(2 * steps, self.weigh, is_once=True)
        if is_anything_compiled():  # new wrappers would make torch.compile compile again
            return
        for kind in self._watched:
            self._open(kind)
        most = max(self.most_share * sum(self._watch.lanes.spent), _MOST_NS * steps) / _CALL_NS
        for kind in sorted({self._places[number].kind for number in self._hooks}):
            if kind not in self._watched and (count := self._watch.calls.count(kind)) > most:
                self._close(kind, steps)
                often = max(1, round(count / steps))
                self._watch.notes[
                    f"{kind}: {often} call{'s' if often > 1 else ''} a step are too many to time "
                    f"in each; the first {steps} steps and some later ones stand for all"
                ] = None

    def _open(self, kind: str) -> None:
        steps = self._watch.lanes.steps
        mine = [number for number, place in enumerate(self._places) if place.kind == kind]
        if self._hooks.keys() >= set(mine):
            return  # such wrappers could not be removed
        for unseen in self._unseen.pop(kind, ()):
            unseen.until = steps
        for number in mine:
            self._wrap(number)
        watched = self._watched[kind]
        self._watch.calls.spread(kind, watched, since=steps)
        close = partial(self._close, kind, watched + _WINDOW)
        self._watch.at(steps + _WINDOW, close, is_once=True)

    def _close(self, kind: str, watched: int) -> None:
        for number in [number for number in self._hooks if self._places[number].kind == kind]:
            if not self._hooks[number].remove():
                return  # another package has wrapped it since
            del self._hooks[number]
        self._watched[kind] = watched
        self._watch.calls.spread(kind, watched)
        for (of, lane), ns in self.shifted.items():
            if of == kind and lane != self._lane:
                unseen = self._watch.lanes.takes_each_step(ns / watched, lane, self._lane)
                self._unseen.setdefault(kind, []).append(unseen)

    def remove(self) -> None:
        """Remove all wrappers for good."""
        for hook in self._hooks.values():
            hook.remove()
        for of in (self._hooks, self._places, self._watched):
            of.clear()
