import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.train.running_mean import RunningMean

NUMBER = st.floats(-1e3, 1e3, width=32)
WEIGHT = st.integers(0, 1000)


@given(st.lists(st.tuples(NUMBER, WEIGHT, st.booleans()), max_size=600))
@settings(max_examples=25)
def test_the_weighted_mean_of_all(steps):
    mean = RunningMean()
    for value, weight, as_tensor in steps:
        mean.add(torch.tensor(value), torch.tensor(weight) if as_tensor else float(weight))
    whole = sum(weight for _, weight, _ in steps)
    if not whole:
        assert math.isnan(mean.mean())
        return
    wanted = math.fsum(value * weight for value, weight, _ in steps) / whole
    assert mean.mean() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert mean.mean() == mean.mean()


def test_large_counts_stay_exact():
    mean = RunningMean()
    mean.add(torch.tensor(1.0), 2.0**24 + 1)
    mean.add(torch.tensor(0.0), torch.tensor(2**24 + 3))
    assert mean.mean() == (2**24 + 1) / (2**25 + 4)


def test_values_of_several_types_and_shapes():
    mean = RunningMean()
    mean.add(torch.tensor([2.0], dtype=torch.bfloat16), 1)
    mean.add(torch.tensor(4.0, dtype=torch.float64), torch.tensor([3]))
    assert mean.mean() == 3.5


def test_nothing_is_kept_of_many_steps():
    mean = RunningMean()
    for _ in range(1000):
        mean.add(torch.ones(()), 1)
    assert len(mean._values) < 256
    assert mean.mean() == 1


def test_a_nan_shows():
    mean = RunningMean()
    mean.add(torch.tensor(1.0), 1)
    mean.add(torch.tensor(float("nan")), 1)
    assert math.isnan(mean.mean())


def test_going_on_from_a_state():
    mean, other = RunningMean(), RunningMean()
    for value in range(10):
        mean.add(torch.tensor(float(value)), value)
    other.add(torch.tensor(99.0), 99)
    other.load_state_dict(mean.state_dict())
    assert other.mean() == mean.mean()
    for each in (mean, other):
        each.add(torch.tensor(5.0), 7)
    assert other.mean() == mean.mean()
    mean.reset()
    assert math.isnan(mean.mean())
    assert mean.state_dict() == {"total": 0.0, "weight": 0.0}
