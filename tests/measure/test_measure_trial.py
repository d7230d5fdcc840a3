import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import FlatoutError
from flatout.measure.trial import (
    Interval,
    TrialResult,
    bootstrap_paired,
    bootstrap_ratio,
    run_trial,
)


class Machine:
    """A simulated machine: its noise, its drift, and a clock that its blocks move."""

    def __init__(self, seed, sigma=0.01, drift=0.0, held_up=0.0, block_s=0.1):
        self.random = np.random.default_rng(seed)
        self.sigma, self.drift, self.held_up, self.block_s = sigma, drift, held_up, block_s
        self.blocks = 0
        self.order = ""

    def measure(self, name, seconds):
        def block():
            self.order += name
            self.blocks += 1
            noise = self.random.normal(0, self.sigma) + self.drift * self.blocks
            if self.random.random() < self.held_up:
                noise += self.random.exponential(0.2)
            return seconds * math.exp(noise)

        return block

    def clock(self):
        return self.blocks * self.block_s

    def trial(self, a=0.010, b=0.010, **settings):
        return run_trial(self.measure("A", a), self.measure("B", b), clock=self.clock, **settings)


def test_blocks_run_in_the_order_a_b_b_a():
    machine = Machine(0)
    result = machine.trial(min_pairs=3, max_pairs=3)
    assert machine.order == "ABBA" * 3
    assert result.pairs == 3


@settings(deadline=None, max_examples=30)
@given(st.floats(0.4, 2.5), st.integers(0, 10**6), st.floats(0, 0.005))
def test_a_true_ratio_is_found(ratio, seed, drift):
    result = Machine(seed, drift=drift).trial(a=0.010 * ratio, b=0.010, min_pairs=8)
    assert result.ratio == pytest.approx(ratio, rel=0.03)
    assert result.low <= result.ratio <= result.high
    if ratio > 1.1:
        assert result.wins
        assert not result.loses
    if ratio < 0.9:
        assert result.loses
        assert not result.wins


def test_the_interval_covers_the_true_ratio_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        result = Machine(seed).trial(a=0.0108, b=0.0100, min_pairs=8)
        covered += result.low <= 1.08 <= result.high
    assert covered / 200 > 0.88


@pytest.mark.parametrize("held_up", [0.0, 0.1])
def test_a_against_a_rarely_wins_or_loses(held_up):
    results = [Machine(seed, held_up=held_up).trial() for seed in range(300)]
    assert sum(result.wins for result in results) / 300 <= 0.05
    assert sum(result.loses for result in results) / 300 <= 0.05


def test_a_steady_drift_cancels():
    machine = Machine(0, sigma=1e-6, drift=0.05)
    result = machine.trial(a=0.02, b=0.01, min_pairs=2)
    assert result.ratio == pytest.approx(2, rel=1e-4)
    assert result.floor > 0.05


def test_a_clear_difference_stops_early_either_way():
    for a, b in ((0.02, 0.01), (0.01, 0.02)):
        result = Machine(1).trial(a, b)
        assert result.pairs == 2
        assert result.wins or result.loses
    assert Machine(1).trial(0.02, 0.01, min_pairs=5).pairs == 5


def test_a_clear_difference_is_measured_until_it_is_precise():
    def trial(**settings):
        return Machine(1, sigma=0.1).trial(0.02, 0.01, **settings)

    assert trial().pairs == 2
    assert trial().high > 1.1 * trial().low
    precise = trial(precision=0.1, max_pairs=30)
    assert 2 < precise.pairs < 30
    assert precise.high <= 1.1 * precise.low
    assert trial(precision=0.01, max_pairs=7).pairs == 7


def test_no_difference_in_sight_stops_early():
    result = Machine(3).trial(floor=0.2, precision=1e-6)
    assert result.pairs == 2
    assert not result.wins
    assert not result.loses


def test_an_unclear_difference_uses_all_pairs():
    """Quadruples that say 0.9 and 1.2 in turn: neither beyond the floor nor within it."""
    blocks = {"A": iter([1.0, 1.0] * 5), "B": iter([0.9, 0.9, 1.2, 1.2] * 3)}
    result = run_trial(lambda: next(blocks["A"]), lambda: next(blocks["B"]), max_pairs=5)
    assert result.pairs == 5
    assert result.floor == pytest.approx(0, abs=1e-9)
    assert not result.wins
    assert not result.loses


def test_a_known_floor_is_kept():
    result = Machine(4, sigma=0.001).trial(a=0.0105, b=0.0100, floor=0.08)
    assert result.floor == pytest.approx(0.08)
    assert result.ratio == pytest.approx(1.05, rel=0.01)
    assert not result.wins


def test_the_deadline_is_kept_by_not_beginning():
    result = Machine(5, block_s=1.0).trial(min_pairs=6, max_pairs=8, deadline_s=10)
    assert result.pairs == 2
    assert result.seconds == pytest.approx(8)


def test_one_quadruple_always_runs_and_proves_nothing():
    result = Machine(6, sigma=1e-9, block_s=1.0).trial(a=0.02, b=0.01, deadline_s=0.5)
    assert result.pairs == 1
    assert result.ratio == pytest.approx(2)
    assert not result.wins
    assert not result.loses
    assert Machine(6).trial(min_pairs=1, floor=1.0).pairs == 2


def test_the_interval_of_one_quadruple_is_as_wide_as_its_noise():
    blocks = iter((2.0, 1.0, 1.0, 2.2))
    result = run_trial(lambda: next(blocks), lambda: next(blocks), deadline_s=0.0)
    assert result.pairs == 1
    assert result.floor > 0.04
    assert result.high / result.ratio == pytest.approx(1 + result.floor)
    assert result.ratio / result.low == pytest.approx(1 + result.floor)


def test_the_same_blocks_give_the_same_result():
    assert Machine(7).trial(0.011) == Machine(7).trial(0.011)


def test_result_tells_medians_and_words():
    blocks = iter([1.19, 1.0, 1.0, 1.19] * 2)
    result = run_trial(lambda: next(blocks), lambda: next(blocks), max_pairs=2)
    assert (result.a_median, result.b_median) == (1.19, 1.0)
    assert result.words == "1.19x [1.19,1.19] (A/A ±0.0%)"
    assert result.step_s == pytest.approx((1.19, 1.0))
    told = TrialResult(1.19, 1.17, 1.21, 0.009, 5, 1.19, 1.0, 3.0)
    assert told.words == "1.19x [1.17,1.21] (A/A ±0.9%)"


def test_the_sides_lie_apart_by_the_ratio_where_the_machine_grows_slower():
    quadruples = [[3.0, 2.0, 2.0, 3.0], [30.0, 20.0, 20.0, 30.0], [42.0, 30.0, 30.0, 42.0]]
    blocks = iter([time for one in quadruples for time in one])
    result = run_trial(lambda: next(blocks), lambda: next(blocks), max_pairs=3, min_pairs=3)
    assert result.ratio == pytest.approx(1.5)
    a, b = result.step_s
    assert a / b == pytest.approx(1.5)
    assert a * b == pytest.approx(result.a_median * result.b_median)
    uneven = TrialResult(1.19, 1.17, 1.21, 0.009, 5, 1.0, 1.0, 3.0)
    assert uneven.step_s == pytest.approx((math.sqrt(1.19), 1 / math.sqrt(1.19)))


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan, math.inf])
def test_an_impossible_time_is_refused_with_its_configuration(time):
    with pytest.raises(FlatoutError, match="configuration B"):
        run_trial(lambda: 1.0, lambda: time)


@pytest.mark.parametrize("pairs", [{"min_pairs": 0}, {"min_pairs": 5, "max_pairs": 4}])
def test_senseless_numbers_of_pairs_are_refused(pairs):
    with pytest.raises(FlatoutError, match="min_pairs"):
        run_trial(lambda: 1.0, lambda: 1.0, **pairs)


def test_the_floor_grows_with_the_noise():
    def floor(sigma):
        machine = Machine(8, sigma=sigma)
        a, b = machine.measure("A", 0.01), machine.measure("B", 0.01)
        return run_trial(a, b, min_pairs=4, max_pairs=4, clock=machine.clock).floor

    assert 0 <= floor(0.002) < 0.01 < floor(0.05) < 0.2


def test_paired_times_need_not_be_alike():
    """Each pair has its own level, which cancels; unpaired, it hides the ratio."""
    random = np.random.default_rng(9)
    level = np.exp(random.normal(0, 0.5, 12))
    a, b = 1.1 * level * np.exp(random.normal(0, 0.003, 12)), level
    paired = bootstrap_paired(a, b)
    assert paired.low <= 1.1 <= paired.high
    assert paired.high - paired.low < 0.02
    unpaired = bootstrap_ratio(a, b)
    assert unpaired.high - unpaired.low > 0.2


def test_the_blocks_of_a_pair_are_joined_by_their_logs():
    joined = bootstrap_paired([[1.0, 4.0], [2.0, 2.0]], [[1.0, 1.0], [0.5, 2.0]])
    assert joined == pytest.approx(Interval(2.0, 2.0, 2.0))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9),
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9),
)
def test_the_ratio_of_restarts_is_that_of_the_medians(a, b):
    interval = bootstrap_ratio(a, b)
    assert interval.mid == pytest.approx(np.median(a) / np.median(b))
    slack = 1 + 1e-9
    assert min(a) / max(b) <= interval.low * slack
    assert interval.low <= interval.mid * slack
    assert interval.mid <= interval.high * slack
    assert interval.high <= max(a) / min(b) * slack


def test_restarts_cover_the_true_ratio():
    random = np.random.default_rng(10)
    covered = 0
    for seed in range(200):
        a = 1.05 * np.exp(random.normal(0, 0.02, 9))
        b = np.exp(random.normal(0, 0.02, 9))
        interval = bootstrap_ratio(a, b, seed=seed)
        covered += interval.low <= 1.05 <= interval.high
    assert covered / 200 > 0.9


@pytest.mark.parametrize("compare", [bootstrap_paired, bootstrap_ratio])
def test_times_that_are_none_or_not_positive_are_refused(compare):
    with pytest.raises(FlatoutError, match="no times given for a"):
        compare([], [1.0])
    with pytest.raises(FlatoutError, match=r"-2\.0 in b"):
        compare([1.0, 1.0], [1.0, -2.0])


def test_pairs_must_match():
    with pytest.raises(FlatoutError, match="2 of a, 3 of b"):
        bootstrap_paired([1.0, 2.0], [1.0, 2.0, 3.0])
