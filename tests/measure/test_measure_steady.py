"""Growth from one measurement to the next, and jumps between levels that are none."""

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
