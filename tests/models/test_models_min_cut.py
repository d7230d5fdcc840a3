"""A minimum cut is the best of all prefixes, tried one by one."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as draw

from flatout.models.frozen.min_cut import (
    Graph,
    Value,
    best_cuts,
    condense,
    fastest_within,
)


@draw.composite
def graphs(more):
    """Up to seven calls; each reads inputs and results before it, some of which others read too."""
    calls = more(draw.integers(1, 7))
    values = []
    for maker in [None, *range(calls)]:
        first = 0 if maker is None else maker + 1
        size = more(draw.integers(1, 9) | draw.none())
        readers = (
            more(draw.frozensets(draw.integers(first, calls - 1), max_size=3))
            if (first < calls)
            else frozenset()
        )
        values.append(Value(maker, size, readers, more(draw.booleans()) or not readers))
    spent = more(draw.lists(draw.integers(0, 9), min_size=calls, max_size=calls))
    pairs = [(one, other) for other, one in combinations(range(calls), 2)]
    needs = more(draw.lists(draw.sampled_from(pairs), max_size=1)) if pairs else []
    return Graph(spent, values, needs)


def is_legal(graph, prefix):
    """Whether all that is kept can be, and nothing that is left out needs what is not."""
    made = [value for value in graph.values if value.maker is not None]
    pairs = [*graph.needs, *((one, value.maker) for value in made for one in value.readers)]
    return all(one not in prefix or other in prefix for one, other in pairs) and not any(
        value.size is None and graph.is_kept(value, prefix) for value in graph.values
    )


def every(graph, inside):
    """All legal prefixes."""
    calls = range(len(graph.spent))
    found = [frozenset(one) for size in range(len(calls) + 1) for one in combinations(calls, size)]
    return [one for one in found if is_legal(graph, one) and one >= inside]


@settings(max_examples=80, deadline=None)
@given(graphs(), draw.integers(0, 20), draw.booleans())
def test_the_cut_is_the_best_of_all(graph, most, forced):
    small, groups = condense(graph)
    inside = frozenset({0} if forced else ())
    own = {place for place, group in enumerate(groups) if group & inside}
    legal = every(graph, inside)

    def whole(prefix):
        return frozenset(call for place in prefix for call in groups[place])

    found = [whole(one) for one in best_cuts(small, own)]
    assert all(one in legal for one in found)
    assert [graph.bytes(one) for one in found] == sorted({graph.bytes(one) for one in found})
    for byte, unit in [(0, 1), (1, 0), *((a, b) for a in (1, 2, 3, 7) for b in (1, 2, 5))]:
        costs = [[graph.cost(one, unit, byte) for one in ones] for ones in (found, legal)]
        assert min(costs[0], default=None) == min(costs[1], default=None)
    within = [graph.time(one) for one in legal if graph.bytes(one) <= most]
    fast = fastest_within(small, most, own)
    if fast is None:
        assert not within
    else:
        assert graph.bytes(whole(fast)) <= most
        assert graph.time(whole(fast)) == min(within)
