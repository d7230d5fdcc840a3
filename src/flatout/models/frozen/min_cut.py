"""Selection of the frozen calls to leave out: the best trade-offs of time saved and bytes kept.

A call that is left out takes no time, but all calls before it that it depends on must be left out
too. Such a set is a closure of the graph, and the best closure is a minimum cut (Picard, 1976),
found here by Dinic's algorithm (1970). A value that several calls read is a separate node of the
graph, so that its bytes are counted only once. All cuts that are best for some price of a byte are
found by solving again between two known cuts (Eisner and Severance, 1976). With a limit on bytes,
the same method bounds the remaining candidates. Integers make the results exact.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction

Prefix = frozenset[int]
# Maximum number of branch-and-bound steps if bytes are limited, which is a knapsack problem. After
# these steps the best prefix so far is used.
_TRIED = 64


@dataclass(frozen=True)
class Value:
    """The result of a call, or an input of the model.

    Attributes:
        maker: index of the call that makes the value; None for an input.
        size: bytes of the value per sample; None if the value cannot be kept.
        readers: indices of the frozen calls that read the value.
        is_needed: whether a call that is never left out reads the value.
    """

    maker: int | None
    size: int | None
    readers: frozenset[int]
    is_needed: bool


@dataclass(frozen=True)
class Graph:
    """The frozen calls of a forward, each after the calls that it depends on.

    Attributes:
        spent: time of each call, in any unit.
        values: the values that the calls read and make.
        needs: pairs of a call and another call that must be left out with it, though no value
            connects them.
    """

    spent: list[int]
    values: list[Value]
    needs: list[tuple[int, int]]

    def time(self, prefix: Collection[int]) -> int:
        """Return the time of the calls that are not in a prefix and so run in each step."""
        return sum(spent for call, spent in enumerate(self.spent) if call not in prefix)

    def bytes(self, prefix: Collection[int]) -> int:
        return sum(value.size or 0 for value in self.values if self.is_kept(value, prefix))

    def cost(self, prefix: Collection[int], unit: int, byte: int) -> int:
        return unit * self.time(prefix) + byte * self.bytes(prefix)

    def is_kept(self, value: Value, prefix: Collection[int]) -> bool:
        """Return whether a value made in the prefix is read outside of it."""
        is_made = value.maker is None or value.maker in prefix
        return is_made and (
            value.is_needed or any(reader not in prefix for reader in value.readers)
        )

    def best(
        self, unit: int, byte: int, inside: Collection[int] = (), outside: Collection[int] = ()
    ) -> Prefix | None:
        """Return the legal prefix of least cost, or None."""
        calls = len(self.spent)
        source, sink = calls + len(self.values), calls + len(self.values) + 1
        never = self.cost((), unit, 0) + byte * sum(v.size or 0 for v in self.values) + 1
        edges = [(source, call, unit * spent) for call, spent in enumerate(self.spent)]
        edges += [(source, call, never) for call in inside]
        edges += [(call, sink, never) for call in outside]
        edges += [(item, other, never) for item, other in self.needs]
        for node, value in enumerate(self.values, calls):
            maker = source if value.maker is None else value.maker
            edges.append((maker, node, never if value.size is None else byte * value.size))
            edges += [(node, reader, never) for reader in value.readers]
            edges += [(reader, maker, never) for reader in value.readers if maker != source]
            if value.is_needed:
                edges.append((node, sink, never))
        flow, near = _min_cut(sink + 1, edges, source, sink)
        return frozenset(n for n in near if n < calls) if flow < never else None


def condense(graph: Graph) -> tuple[Graph, list[frozenset[int]]]:
    """Return a smaller graph with the same best prefixes, and the calls that each call joins.

    A call is joined to its only reader if that has no other input and no larger output. To leave
    out both together then takes no more bytes, and saves more time.
    """
    calls = range(len(graph.spent))
    gives: dict[int, list[Value]] = {call: [] for call in calls}
    makers: dict[int, set[int | None]] = {call: set() for call in calls}
    for value in graph.values:
        if value.maker is not None:
            gives[value.maker].append(value)
        for reader in value.readers:
            makers[reader].add(value.maker)
    bound = {item for item, _ in graph.needs}
    groups = {call: [call] for call in calls}
    for call in reversed(calls):
        readers = {reader for value in gives[call] for reader in value.readers}
        if len(readers) != 1 or any(value.is_needed for value in gives[call]):
            continue
        (reader,) = readers
        alone = makers[reader] == {call} and reader not in bound
        if alone and _most(gives[reader]) <= _most(gives[call]):
            groups[call] += groups.pop(reader)
            gives[call] = gives.pop(reader)
    at = {call: place for place, group in enumerate(groups.values()) for call in group}
    outer = [value for value in graph.values if value.maker is None]
    values = [
        Value(
            None if value.maker is None else at[value.maker],
            value.size,
            frozenset(at[reader] for reader in value.readers),
            value.is_needed,
        )
        for value in outer + [value for group in groups for value in gives[group]]
    ]
    spent = [sum(graph.spent[call] for call in group) for group in groups.values()]
    needs = [(at[item], at[other]) for item, other in graph.needs]
    return Graph(spent, values, needs), [frozenset(group) for group in groups.values()]


def _most(values: list[Value]) -> float:
    return sum(float("inf") if value.size is None else value.size for value in values)


def best_cuts(graph: Graph, inside: Collection[int] = ()) -> list[Prefix]:
    """Return the prefixes with the least time + price * bytes, for all prices of a byte."""
    few, fast = _fewest(graph, inside), _fastest(graph, inside)
    if few is None or fast is None:
        return []
    result, between = [few], [(few, fast)]
    while between:
        small, other = between.pop()
        unit, byte = graph.bytes(other) - graph.bytes(small), graph.time(small) - graph.time(other)
        if unit == 0:
            continue
        middle = graph.best(unit, byte, inside)
        assert middle is not None
        if graph.cost(middle, unit, byte) < graph.cost(small, unit, byte):
            between += [(middle, other), (small, middle)]
        else:
            result.append(other)
    return result


def fastest_within(graph: Graph, most: int, inside: Collection[int] = ()) -> Prefix | None:
    """Return the prefix with the least time among those that keep at most `most` bytes, or None.

    Uses branch and bound. For a graph that takes more than `_TRIED` steps, returns the best one
    found.
    """
    best: Prefix | None = None
    left = [(frozenset(inside), frozenset[int]())]
    for _ in range(_TRIED):
        if not left:
            break
        inner, outer = left.pop()
        few, fast = _fewest(graph, inner, outer), _fastest(graph, inner, outer)
        if few is None or fast is None or graph.bytes(few) > most:
            continue
        if graph.bytes(fast) <= most:
            few = fast
        few, fast, bound = _tightened(graph, most, (few, fast), (inner, outer))
        if best is None or graph.time(few) < graph.time(best):
            best = few
        if bound < graph.time(best):
            call = min(few ^ fast)
            left += [(inner, outer | {call}), (inner | {call}, outer)]
    return best


def _tightened(
    graph: Graph, most: int, pair: tuple[Prefix, Prefix], fixed: tuple[Prefix, Prefix]
) -> tuple[Prefix, Prefix, Fraction]:
    few, fast = pair
    while True:
        unit, byte = graph.bytes(fast) - graph.bytes(few), graph.time(few) - graph.time(fast)
        if unit == 0:
            return few, fast, Fraction(graph.time(few))
        middle = graph.best(unit, byte, *fixed)
        assert middle is not None
        if graph.cost(middle, unit, byte) == graph.cost(few, unit, byte):
            return few, fast, graph.time(few) - Fraction(byte * (most - graph.bytes(few)), unit)
        if graph.bytes(middle) <= most:
            few = middle
        else:
            fast = middle


def _fewest(graph: Graph, *fixed: Collection[int]) -> Prefix | None:
    return graph.best(1, graph.time(()) + 1, *fixed)


def _fastest(graph: Graph, *fixed: Collection[int]) -> Prefix | None:
    return graph.best(sum(value.size or 0 for value in graph.values) + 1, 1, *fixed)


def _min_cut(
    nodes: int, edges: list[tuple[int, int, int]], source: int, sink: int
) -> tuple[int, set[int]]:
    to, room = list[int](), list[int]()
    out = [list[int]() for _ in range(nodes)]
    for item, other, size in edges:
        out[item].append(len(to))
        out[other].append(len(to) + 1)
        to += [other, item]
        room += [size, 0]
    flow = 0
    while True:
        level, reached = {source: 0}, [source]
        for node in reached:
            for edge in out[node]:
                if room[edge] and to[edge] not in level:
                    level[to[edge]] = level[node] + 1
                    reached.append(to[edge])
        if sink not in level:
            return flow, set(reached)
        flow += _fill(to, room, out, level, source, sink)


def _fill(
    to: list[int],
    room: list[int],
    out: list[list[int]],
    level: dict[int, int],
    source: int,
    sink: int,
) -> int:
    at, way, node, flow = [0] * len(out), list[int](), source, 0
    while True:
        if node == sink:
            least = min(room[edge] for edge in way)
            flow += least
            for edge in way:
                room[edge] -= least
                room[edge ^ 1] += least
            full = next(place for place, edge in enumerate(way) if not room[edge])
            node = to[way[full] ^ 1]
            del way[full:]
        elif at[node] < len(out[node]):
            edge = out[node][at[node]]
            if room[edge] and level.get(to[edge]) == level[node] + 1:
                way.append(edge)
                node = to[edge]
            else:
                at[node] += 1
        elif way:
            node = to[way.pop() ^ 1]
            at[node] += 1
        else:
            return flow
