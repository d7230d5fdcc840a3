"""Rows that are brought through the steps they missed are those of the dense optimizer."""

from itertools import pairwise

import pytest
import torch

from flatout.kernels import LowerBits, Table, halves, in_float32, joined, table_rows

pytestmark = pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")


def test_rows_and_their_places_are_found_in_order():
    ids = torch.tensor([[5, 2, 5], [70_000, 2, 5]])
    rows, places, starts = table_rows.group(ids, 70_001)
    assert rows.tolist() == [2, 5, 70_000]
    assert places.tolist() == [1, 4, 0, 2, 5, 3]
    assert starts.tolist() == [0, 2, 5, 6]
    assert table_rows.group(ids[:0], 5).rows.tolist() == []


@pytest.mark.parametrize(("first", "ranks"), [(0, 1), (1, 2), (2, 3), (4, 7)])
def test_rows_are_dealt_to_their_owners(first, ranks):
    ids = (torch.rand(500) ** 3 * 900).long()
    groups = table_rows.group(ids, 900)
    dealt = table_rows.group_by_rank(groups, first, ranks, 3)
    owners = (dealt.groups.rows // 8 + first) % ranks
    assert dealt.counts == owners.bincount(minlength=ranks).tolist()
    order = sorted(groups.rows.tolist(), key=lambda row: (row // 8 + first) % ranks)
    assert dealt.groups.rows.tolist() == order
    assert dealt.local.tolist() == [row // 8 // ranks * 8 + row % 8 for row in order]
    assert torch.equal(dealt.groups.rows[dealt.numbers], ids)
    for row, (start, end) in zip(order, pairwise(dealt.groups.starts), strict=True):
        assert dealt.groups.places[start:end].tolist() == (ids == row).nonzero()[:, 0].tolist()
    nothing = table_rows.group_by_rank(table_rows.group(ids[:0], 900), first, ranks, 3)
    assert nothing.counts == [0] * ranks


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_outside_of_the_table_is_refused(bad):
    with pytest.raises(IndexError, match=rf"ids\[1\] is {bad}, but the table has 5 rows"):
        table_rows.group(torch.tensor([0, bad]), 5)


def test_the_number_of_threads_changes_no_bit():
    torch.manual_seed(0)
    ids, values = torch.randint(500, (4000,)), torch.randn(4000, 24)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            groups = table_rows.group(ids, 500)
            found.append((table_rows.sum_rows(values, groups), *stepped(groups, values)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def stepped(groups, values):
    torch.manual_seed(1)
    weights = torch.randn(500, 24)
    zeros = torch.zeros(2, 2, 500, 24)
    last = torch.zeros(2, 500, dtype=torch.int32)
    tables = [Table(weights.clone(), *zeros[n], last[n], 1e-8) for n in range(2)]
    steps = table_rows.Steps("adam", 0, 100)
    for count in range(1, 40):
        rows = groups.rows[count % 7 :: 7].contiguous()
        gradients = table_rows.sum_rows(values, groups)[count % 7 :: 7].contiguous()
        steps.write(
            table_rows.Step(
                1e-2 / (1 - 0.9**count), 1.0, 0.9, 0.999, first_rest=0.1, second_rest=0.001
            )
        )
        # Of tables that are stepped together each is as if it were alone.
        halves = [
            table_rows.Change(tables[1], *(one[n::2].contiguous() for one in (rows, gradients)))
            for n in range(2)
        ]
        steps.apply([table_rows.Change(tables[0], rows, gradients), *halves])
        steps.advance()
    for table in tables:
        steps.bring(table, None)
    assert torch.equal(tables[0].weights, tables[1].weights)
    assert torch.equal(zeros[0], zeros[1])
    return tables[0].weights, *zeros[0]


RULES = {
    "adam": lambda n: adam_step(n, (0.9, 0.999), in_float32(0.999)),
    "sgd": lambda n: table_rows.Step(1e-2 / n, first=in_float32(0.9), nesterov=True, decay=1e-3),
    "rmsprop": lambda n: table_rows.Step(1e-3 * n, first=0.5, second=0.9, second_rest=0.1),
    "adagrad": lambda n: table_rows.Step(1e-1 / n, keep=in_float32(0.99)),
}


def of_rule(name, width, split, widest=512):
    """What twenty steps make of a table, as float32 numbers."""
    draw = torch.Generator().manual_seed(2)
    size = 700  # more than threads take at a time
    whole = [torch.randn(size, width, generator=draw), torch.zeros(size, width)]
    whole.append(None if name in ("sgd", "adagrad") else torch.zeros(size, width))
    lower = None
    if split:
        parts = [(None, None) if one is None else halves(one) for one in whole]
        whole, lower = zip(*parts, strict=True)
    last = torch.zeros(size, dtype=torch.int32)
    table = Table(*whole, last, 1e-6, lower and LowerBits(*lower))
    steps = table_rows.Steps(name, 0, 100, widest)
    for count in range(1, 21):
        rows = (torch.rand(90, generator=draw) ** 3 * size).long().unique()
        steps.bring(table, rows[::2].contiguous())
        steps.write(RULES[name](count))
        gradients = torch.randn(len(rows), width, generator=draw)
        steps.apply([table_rows.Change(table, rows, gradients)])
        steps.advance()
    steps.bring(table, None)
    if lower is None:
        return whole
    return [None if a is None else joined(a, b) for a, b in zip(whole, lower, strict=True)]


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(a is b is None or torch.equal(a.view(torch.int32), b.view(torch.int32))
               for a, b in pairs)  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("width", [1, 37])
def test_vectors_and_halves_change_no_bit(name, width):
    wanted = of_rule(name, width, split=False)
    before = torch.get_num_threads()
    for widest, threads in ((512, 1), (256, 2), (0, 5)):
        try:
            torch.set_num_threads(threads)
            assert same(of_rule(name, width, False, widest), wanted)
            assert same(of_rule(name, width, True, widest), wanted)
        finally:
            torch.set_num_threads(before)


BETAS = {"torch's": (0.9, 0.999), "short": (0.5, 0.9), "long": (0.99, 0.9999), "near": (0.95, 0.95)}


def adam_step(count, betas, keep=1.0):
    first, second = betas
    return table_rows.Step(
        1e-2 / (1 - first**count),
        (1 - second**count) ** -0.5,
        1 - in_float32(1 - first),
        in_float32(second),
        keep,
        first_rest=in_float32(1 - first),
        second_rest=in_float32(1 - second),
    )


def by_hand(weights, first, second, steps, epsilon):
    """Steps without a gradient, in float64."""
    weights, first, second = weights.double(), first.double(), second.double()
    for step in steps:
        first, second = first * step.first, second * step.second
        weights = step.keep * weights - step.rate * first / (second.sqrt() * step.root + epsilon)
    return weights


@pytest.mark.parametrize("missed", [5, 30, 250])
@pytest.mark.parametrize("start", [1, 2, 20, 200])
@pytest.mark.parametrize("betas", BETAS.values(), ids=BETAS)
def test_steps_that_were_missed_early_are_those_of_adam(betas, start, missed):
    torch.manual_seed(0)
    count, epsilon = start + missed, 1e-4
    keep = in_float32(0.999)
    gone = [adam_step(one, betas, keep) for one in range(1, count + 1)]
    # Roots far below epsilon, about it, and far above.
    first, second = torch.randn(9, 8) * 1e-3, 10 ** -torch.linspace(1, 16, 72).reshape(9, 8)
    weights = torch.randn(9, 8) * 1e-2
    table = Table(
        weights.clone(), first.clone(), second.clone(), torch.zeros(9, dtype=torch.int32), epsilon
    )
    steps = table_rows.Steps("adam", 0, 1000)
    for step in gone:
        steps.write(step)
        steps.advance()
    table.last.fill_(start)
    steps.bring(table, None)
    wanted = by_hand(weights, first, second, gone[start:], epsilon)
    moved = (wanted - weights * keep**missed).abs()
    error = (table.weights - wanted).abs()
    assert bool((error <= 3e-6 * moved + 2e-6 * weights.abs()).all())


def test_no_step_that_torchs_adam_missed_is_made_by_itself():
    steps = table_rows.Steps("adam", 0, 1000)
    for count in range(1, 601):
        steps.write(adam_step(count, BETAS["torch's"]))
        steps.advance()
        size, rest = steps._missed[1:count, -2], steps._missed[1:count, -1]
        assert bool((rest <= 3e-7 * size).all())


def test_rows_are_added_up_as_torch_does():
    ids, values = (torch.rand(500) ** 3 * 90).long(), torch.randn(500, 6)
    groups = table_rows.group(ids, 90)
    assert torch.equal(groups.rows, ids.unique())
    wanted = torch.zeros(90, 6, dtype=torch.float64).index_add_(0, ids, values.double())
    sums = table_rows.sum_rows(values, groups).double()
    torch.testing.assert_close(sums, wanted[groups.rows], rtol=1e-5, atol=1e-5)
