"""Growth from one measurement to the next, and jumps between levels that are none."""

import math
from random import Random

import pytest

from flatout.measure import grows_steadily

WOBBLE = [0.02 * (7 * at % 5 - 2) for at in range(98)]


def told(values, noise=0.0004):
    noisy = [value + off for value, off in zip(values, WOBBLE, strict=False)]
    return grows_steadily(range(len(noisy)), noisy, noise)


@pytest.mark.parametrize("count", [16, 40, 98])
@pytest.mark.parametrize(
    "jumps",
    [(0.5,), (0.3, 0.7), (0.25, 0.5, 0.75), (0.1, 0.3, 0.4, 0.9), (0.17, 0.33, 0.5, 0.67, 0.83)],
)
def test_levels_do_not_grow_however_many_there_are(count, jumps):
    assert not told([1.0 + sum(at >= jump * count for jump in jumps) for at in range(count)])
    # Nor where each is higher by more than the one before, as of images that become larger.
    squares = [(1 + sum(at >= jump * count for jump in jumps)) ** 2 for at in range(count)]
    assert not told(squares)


@pytest.mark.parametrize("count", [12, 40, 98])
def test_what_takes_more_each_time_grows_also_where_it_jumps(count):
    line = [1.0 + 2 * at / count for at in range(count)]
    assert told(line)
    assert told([value + (at >= count / 2) for at, value in enumerate(line)])
    assert told([1.0 + 2 * (at / count) ** 2 for at in range(count)])
    assert not told([-value for value in line])
    assert not told([1.0] * count)


def test_stairs_within_the_noise_are_no_jumps():
    stairs = [500.0 + 16 * (at // 5) for at in range(40)]
    assert grows_steadily(range(40), stairs, 16**2 / 12)
    assert not grows_steadily(range(40), stairs, 2**2 / 12)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_few_numbers_say_nothing(count):
    assert not grows_steadily(range(count), [float(at) for at in range(count)], 1.0)


def noisy(values, noise, seed):
    draws = Random(seed)
    return [value + draws.gauss(0, noise) for value in values]


def stairs(count, jumps):
    return [1.0 + at * (jumps + 1) // count for at in range(count)]


def curves(count):
    shapes = {
        "linear": lambda x: x,
        "quadratic": lambda x: x * x,
        "root": math.sqrt,
        "logarithm": lambda x: math.log1p(20 * x) / 3,
    }
    for name, shape in shapes.items():
        for height in (1, 2, 4):
            rising = [1.0 + height * shape(at / count) for at in range(count)]
            yield f"{name}, {height}", rising
            yield f"{name}, {height}, jumps", [v + (at > count / 2) for at, v in enumerate(rising)]


def levels(count):
    for jumps in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20):
        if count >= 4 * jumps:
            yield f"{jumps} jumps", stairs(count, jumps)
    yield "flat", [1.0] * count
    yield "falls", [3.0 - 2 * at / count for at in range(count)]
    yield "warm", [1.0 + math.exp(-20 * at / count) for at in range(count)]
    for period in (3, 5, 8):
        yield f"slow each {period}", [1.0 + (at % period == 0) for at in range(count)]
        yield f"phases of {period}", [1.0 + at // period % 2 for at in range(count)]
        if count >= 3 * period:
            yield f"cleared each {period}", [1.0 + at % period / period for at in range(count)]


def share_told(shapes, noise, seeds):
    """Of series that are told to grow."""
    told = [
        grows_steadily(range(count), noisy(values, noise, f"{seed} {name}"), noise**2 / 4)
        for count in (24, 40, 98)
        for name, values in shapes(count)
        for seed in range(seeds)
    ]
    return sum(told) / len(told)


@pytest.mark.parametrize(("count", "jumps"), [(40, 6), (40, 8), (98, 8), (98, 12), (98, 20)])
def test_many_jumps_of_a_few_times_the_noise_are_no_growth(count, jumps):
    told = [grows_steadily(range(count), noisy(stairs(count, jumps), 0.2, n), 0.01) for n in (1, 2)]
    assert told == [False, False]


def test_what_is_cleared_at_times_does_not_grow():
    saw = noisy([1.0 + at % 12 / 12 for at in range(96)], 0.05, 0)
    assert not grows_steadily(range(96), saw, 0.0006)
    assert grows_steadily(range(96), noisy([at / 24 for at in range(96)], 0.05, 0), 0.0006)


@pytest.mark.slow
def test_of_many_kinds_of_series_those_that_grow_are_told():
    # Of levels less than 0.5% are told, of curves 68% and 55%, many of which rise by a few times
    # the noise. Before orders were compared it was 9 to 12% of levels, and 58 to 74% of curves.
    assert share_told(levels, 0.05, 5) <= 0.005
    assert share_told(levels, 0.2, 5) <= 0.02
    assert share_told(curves, 0.05, 5) >= 0.65
    assert share_told(curves, 0.2, 5) >= 0.5
