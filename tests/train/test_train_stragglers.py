"""A rank that is clearly slower than the others is named, with the lane that makes it slow."""

from types import SimpleNamespace

import numpy as np
import pytest

from flatout.measure import Timeline
from flatout.measure.timeline import LANES
from flatout.train import stragglers
from flatout.train.stragglers import Pace, RankTimes, Times, straggler
from flatout.world import Place, World
from flatout.world.hangs.collective_log import CollectiveLog


def times(host="a", noise=0.5, seed=0, stretches=30, **lanes):
    lanes = dict.fromkeys(LANES, 0.0) | {"backward": 20.0} | lanes
    own = sum(ms for lane, ms in lanes.items() if lane != "sync")
    drawn = np.random.default_rng(seed).normal(own, noise, stretches)
    return Times(host, lanes, drawn.tolist(), [])


def test_the_slow_rank_is_named_with_its_lane_and_what_it_costs():
    found = straggler([times(input=3.0, sync=28.0), times("b", seed=1, input=31.0, noise=0.5)])
    assert found.ranks == (1,)
    assert found.lane == "input"
    assert found.words.startswith(
        "rank 1 (host b) needs 2.2x as long as the others: input takes 31 ms of its 5"
    )
    assert "3 ms on the others" in found.words


def test_all_ranks_of_a_slow_node_are_named():
    fast = [times(seed=seed) for seed in range(5)]
    slow = [times("b", seed=9, forward=15.0), times("b", seed=8, forward=16.0)]
    found = straggler([*fast, *slow])
    assert found.ranks == (6, 5)
    assert "rank 6 (host b) needs 1.8x as long as the others, as does rank 5: forward" in (
        found.words
    )


@pytest.mark.parametrize(
    "other",
    [
        times(seed=1),
        times(seed=1, input=2.0),  # 10% longer
        times(seed=1, input=6.0, noise=40.0),  # longer by chance
        times(seed=1, input=30.0, stretches=5),  # too few steps to tell
        times(seed=1, sync=300.0),  # it waits
    ],
)
def test_equal_ranks_noise_and_waiting_are_no_stragglers(other):
    assert straggler([times(), other]) is None


def test_one_long_pause_is_no_straggler():
    paused = times(seed=1)
    paused.own_ms[7] = 4000.0
    assert straggler([times(), paused]) is None


def test_waiting_is_not_own_time_and_marks_are_thinned_evenly(monkeypatch):
    now, log = [0], CollectiveLog()
    monkeypatch.setattr(stragglers, "clock", lambda: now[0])
    pace = Pace(log)
    for _ in range(1000):
        now[0] += 10_000_000
        log.waited += 7_000_000
        pace.after_step(None, None)
    own = pace.own_ms()
    assert 50 < len(own) <= 128
    assert own == pytest.approx([3.0] * len(own))
    pace.reset()
    assert pace.own_ms() == []


class Two(World):
    """Two ranks, of which the other one needs twice as long."""

    def __init__(self):
        super().__init__(Place(0, 2, 0, 2))

    def gather(self, value, what=""):
        _, lanes, own_ms, _ = value
        slow = {**lanes, "forward": lanes["forward"] * 2 + 5}
        return [value, ("b", slow, [2 * ms + 5 for ms in own_ms], ["of rank 1"])]


def test_a_straggler_is_named_once_and_notes_of_all_ranks_are_told():
    timeline, pace = Timeline(), SimpleNamespace(own_ms=lambda: [4.0] * 20, reset=lambda: None)
    ranks = RankTimes(Two(), timeline, pace)
    for step in range(20):
        timeline.record(step * 5_000_000, 0, 0, 2_000_000, 2_000_000, 0, 0, 0)
    of_0, of_1, named = ranks.end_epoch(["of rank 0"])
    assert (of_0, of_1) == ("of rank 0", "of rank 1")
    assert named.startswith("rank 1 (host b) needs 3.2x as long as the others: forward takes 9 ms")
    assert ranks.end_epoch([]) == ["of rank 1"]
