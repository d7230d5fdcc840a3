import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.data.execution.batch_sampler import BatchSampler, padding_share
from flatout.data.mixture import mixed
from flatout.data.stages.batch import by_length
from flatout.data.stages.repeat import repeated
from flatout.data.stages.shuffle import shuffled, shuffled_in_windows
from flatout.errors import DataError


def in_order(numbers):
    return lambda epoch: numbers


def numbers_of(cut, epoch=0):
    order = cut.order(epoch)
    return [order[slice(*cut.bounds(step))].tolist() for step in range(cut.steps)]


@given(
    st.integers(1, 200), st.integers(1, 40), st.sampled_from(["keep", "drop"]), st.integers(1, 5)
)
def test_ranks_share_each_global_batch(samples, size, last, world):
    order = shuffled(in_order(np.arange(samples)), 3)
    alone = numbers_of(BatchSampler(samples, size, order, last))
    ranks = [numbers_of(BatchSampler(samples, size, order, last, r, world)) for r in range(world)]
    for step, whole in enumerate(alone):
        parts = [rank[step] for rank in ranks]
        if len(whole) < world:
            assert parts == [whole] * world  # computed whole by every rank
        else:
            assert [n for part in parts for n in part] == whole
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 200), st.integers(1, 30))
def test_padding_fills_the_last_batch(samples, size):
    cut = BatchSampler(samples, size, in_order(np.arange(samples)), "pad")
    for step in range(cut.steps):
        start, stop = cut.bounds(step)
        assert stop - start + cut.padding(step) == size


@given(st.integers(0, 100), st.integers(1, 20))
def test_own_rows_are_spread_over_the_steps_of_all(samples, steps):
    cut = BatchSampler(samples, 8, in_order(np.arange(samples)), even_steps=steps)
    found = numbers_of(cut)
    assert len(found) == steps
    assert [n for part in found for n in part] == list(range(samples))


@given(
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from(["keep", "drop", "pad"]),
    st.integers(1, 3),
)
def test_each_pass_is_cut_like_an_epoch(rows, size, passes, last, world):
    one_order = shuffled(in_order(np.arange(rows)), 3)
    for rank in range(world):
        one = BatchSampler(rows, size, one_order, last, rank, world)
        several = BatchSampler(
            passes * rows,
            size,
            repeated(one_order, passes),
            last,
            rank,
            world,
            passes=passes,
        )
        turns = [numbers_of(one, epoch) for epoch in range(passes)]
        assert numbers_of(several) == [batch for turn in turns for batch in turn]
        assert (several.steps, several.used) == (passes * one.steps, passes * one.used)
        padding = [one.padding(step) for step in range(one.steps)] * passes
        assert [several.padding(step) for step in range(several.steps)] == padding


def test_own_rows_keep_the_borders_of_passes():
    order = repeated(in_order(np.arange(5)), 2)
    cut = BatchSampler(10, 4, order, even_steps=4, passes=2)
    assert numbers_of(cut) == [[0, 1], [2, 3, 4]] * 2


def test_a_step_that_is_not_there_is_refused():
    with pytest.raises(DataError, match="no step 3"):
        BatchSampler(8, 4, in_order(np.arange(8))).first(3)


def test_passes_have_orders_of_their_own():
    order = repeated(shuffled(in_order(np.arange(50)), 1), 2)
    first, second = order(1)[:50], order(1)[50:]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()
    assert first.tolist() == shuffled(in_order(np.arange(50)), 1)(2).tolist()


@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 5), st.integers(0, 3))
@example(60, 20, 3, 0)
def test_by_length_moves_rows_only_within_a_window(samples, size, window, epoch):
    lengths = np.random.default_rng(0).integers(0, 50, samples)
    inner = shuffled(in_order(np.arange(samples)), 1)
    found = by_length(inner, lengths, size, window, 1)(epoch)
    before = inner(epoch)
    for start in range(0, samples, size * window):
        part = slice(start, start + size * window)
        assert sorted(found[part]) == sorted(before[part])
    if samples % size == 0:  # where the longest fall into a last batch of few, chance may do better
        starts = BatchSampler(len(before), size, in_order(before)).starts()
        assert padding_share(found, lengths, starts) <= padding_share(before, lengths, starts)


def test_padding_is_counted():
    lengths = np.array([1, 3, 2, 2])
    starts = np.array([0, 2])
    assert padding_share(np.arange(4), lengths, starts) == pytest.approx(1 - 8 / 10)
    assert padding_share(np.arange(4), np.zeros(4, np.int64), starts) == 0


@given(st.integers(0, 5))
def test_mixing_takes_exact_counts_and_goes_on_where_it_stopped(epoch):
    orders = [lambda e: np.arange(10) + 0 * e, lambda e: 100 + np.roll(np.arange(4), e)]
    drawn = mixed(orders, [4, 4], [10, 4], seed=2)
    found = drawn(epoch)
    assert sorted(found[found >= 100] - 100) == [0, 1, 2, 3]
    passes = np.concatenate([np.arange(10)] * 4)
    assert found[found < 100].tolist() == passes[4 * epoch : 4 * epoch + 4].tolist()


def test_windows_stay_together():
    order = shuffled_in_windows(in_order(np.arange(95)), 1, 10)(0)
    assert sorted(order) == list(range(95))
    assert order.tolist() != sorted(order)
    assert order.tolist() != shuffled_in_windows(in_order(np.arange(95)), 1, 10)(1).tolist()
    jumps = np.flatnonzero(np.diff(order // 10))
    assert len(jumps) == 9  # each window is one run
