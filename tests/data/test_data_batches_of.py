from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.execution.batch_sampler import batches_of, check_steps, check_workers
from flatout.errors import DataError


def _plan(samples, batch_size, drop_last=False, **more):
    return batches_of(
        samples, batch_size=batch_size, shuffle=True, seed=0, drop_last=drop_last, **more
    )


@settings(deadline=None)
@given(st.data(), st.integers(1, 100), st.booleans())
def test_steps_and_samples_of_an_epoch(data, samples, drop_last):
    batch_size = data.draw(st.integers(1, samples))
    plan = _plan(samples, batch_size, drop_last)
    starts = range(0, samples, batch_size)
    sizes = [min(batch_size, samples - start) for start in starts]
    if drop_last:
        sizes = [size for size in sizes if size == batch_size]
    assert plan.steps == len(sizes)
    assert plan.used == sum(sizes)


def test_no_batch_size_means_32_or_all():
    assert _plan(1000, None).batch_size == 32
    assert _plan(5, None).batch_size == 5


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_larger_than_the_data_names_both_numbers(drop_last):
    with pytest.raises(DataError, match=r"batch_size is 2,000, but there are 1,437 samples") as e:
        _plan(1437, 2000, drop_last)
    assert e.value.do == "lower batch_size to at most 1,437"


def test_evaluation_may_clip_the_batch():
    assert _plan(10, 64, clip_batch=True).batch_size == 10
    assert _plan(100, 64, clip_batch=True).batch_size == 64


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "8", True])
def test_a_batch_size_is_a_positive_int(batch_size):
    with pytest.raises(DataError, match=f"at least 1, found {batch_size!r}"):
        _plan(10, batch_size)


def test_other_numbers_are_checked_alike():
    with pytest.raises(DataError, match="workers: expected an int of at least 0, found -1"):
        check_workers(-1)
    with pytest.raises(DataError, match="steps: expected an int of at least 1, found 0"):
        check_steps(0)
    assert check_workers(0) == 0


def test_no_samples():
    with pytest.raises(DataError, match="the data is empty"):
        _plan(0, 8)


def test_a_first_step_lies_within_the_epoch():
    plan = _plan(10, 4)
    assert [plan.first(step) for step in range(4)] == [0, 4, 8, 10]
    for step in (-1, 4):
        with pytest.raises(DataError, match="3 steps"):
            plan.first(step)
