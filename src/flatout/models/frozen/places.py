"""The useful places to cut a forward: its frozen calls as a graph with times and bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf

from flatout.models.frozen.form import Form
from flatout.models.frozen.min_cut import (
    Graph,
    Prefix,
    Value,
    best_cuts,
    condense,
    fastest_within,
)
from flatout.models.frozen.recording import ForwardRecording, store_of

# Maximum number of branches whose first call with weights is tried as the begin of a cut.
_FIRST = 8


class Places:
    """The places at which a recorded forward may be cut.

    Attributes:
        frozen: indices of the frozen events.
    """

    def __init__(
        self, noted: ForwardRecording, frozen: list[int], forms: dict[int, Form], spent: list[int]
    ) -> None:
        self.frozen = frozen
        self._noted, self._forms, self._spent = noted, forms, spent
        assert noted.given is not None
        self._given = noted.given.numbers()
        self._writers: dict[int, list[int]] = {}
        for index, event in enumerate(noted.events):
            for store in event.stores:
                self._writers.setdefault(store, []).append(index)

    def best(self, most: float) -> list[list[int]]:
        """Return the events before each useful cut, in the order of rising kept bytes."""
        graph, groups = condense(self.graph())
        weigh = {n for n, group in enumerate(groups) if any(map(self._weighs, group))}
        result = _cuts(graph, most)
        if result and weigh.isdisjoint(result[0]):
            # Keeping the inputs would take the fewest bytes, but saves no computation.
            for place in self._first_weights():
                result += _cuts(
                    graph, most, [n for n, group in enumerate(groups) if place in group]
                )
        sensible, least = [], inf
        for item in sorted(set(result), key=lambda value: (graph.bytes(value), graph.time(value))):
            if graph.time(item) < least and not weigh.isdisjoint(item):
                least = graph.time(item)
                sensible.append(sorted(self.frozen[at] for group in item for at in groups[group]))
        return [prefix for prefix in sensible if self._is_legal(prefix)]

    def kept(self, prefix: Sequence[int]) -> list[int]:
        """Return the values made before a cut that are read after it."""
        events, before = self._noted.events, set(prefix)
        read = {n for at, event in enumerate(events) if at not in before for n in event.reads}
        read.update(self._given)
        born = [*self._noted.inputs, *(n for index in prefix for n in events[index].gives())]
        return [number for number in dict.fromkeys(born) if number in read]

    def graph(self) -> Graph:
        places = {index: place for place, index in enumerate(self.frozen)}
        makers: dict[int, int | None] = dict.fromkeys(self._noted.inputs)
        readers: dict[int, set[int]] = {}
        needed, needs = set(self._given), set[tuple[int, int]]()
        for index, event in enumerate(self._noted.events):
            place = places.get(index)
            if place is None:
                needed.update(event.reads)
                continue
            for number in event.reads:
                readers.setdefault(number, set()).add(place)
                later = self._written_after(number, makers.get(number))
                needs.update((place, places[at]) for at in later if at in places and at < index)
            for number in event.gives():
                makers.setdefault(number, place)
        values = [
            Value(place, self._size(number, place), frozenset(own), number in needed)
            for number, place in makers.items()
            if (own := readers.get(number, set())) or number in needed
        ]
        return Graph([self._spent[index] for index in self.frozen], values, sorted(needs))

    def _written_after(self, number: int, place: int | None) -> list[int]:
        born = -1 if place is None else self.frozen[place]
        writers = self._writers.get(store_of(self._noted.values[number]), [])
        return [at for at in writers if at > born]

    def _size(self, number: int, place: int | None) -> int | None:
        form = self._forms.get(number)
        if form is None or form.axis is None or self._written_after(number, place):
            return None
        return form.bytes_per_sample

    def _weighs(self, place: int) -> bool:
        return self._noted.events[self.frozen[place]].weighs

    def _first_weights(self) -> list[int]:
        result, below = [], set[int]()
        for place, index in enumerate(self.frozen):
            event = self._noted.events[index]
            is_below = not below.isdisjoint(event.reads)
            if event.weighs and not is_below:
                result.append(place)
            if event.weighs or is_below:
                below.update(event.gives())
        return result[:_FIRST]

    def _is_legal(self, prefix: Collection[int]) -> bool:
        before, events = set(prefix), self._noted.events
        kept = {
            number: store_of(self._noted.values[number]) for number in self.kept(sorted(before))
        }
        stores: dict[int, int] = {}
        for index, event in enumerate(events):
            for number in event.reads if index not in before else ():
                if number in kept:
                    stores.setdefault(kept[number], index)
        return not any(
            store in event.stores and (index not in before or index > first)
            for index, event in enumerate(events)
            for store, first in stores.items()
        )


def _cuts(graph: Graph, most: float, inside: Collection[int] = ()) -> list[Prefix]:
    result = best_cuts(graph, inside)
    if most < inf and (fast := fastest_within(graph, int(most), inside)) is not None:
        result.append(fast)
    return result
