"""Ranks and the command are killed at random; the weights come out right each time."""

import os

import pytest
from random_kills import kill_at_random

from flatout.measure import usable_cpus


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")
@pytest.mark.long
def test_killed_at_random_the_weights_are_those_of_an_undisturbed_run(tmp_path):
    # As many as one likes: FLATOUT_TEST_KILLS=100, and another FLATOUT_TEST_SEED.
    kills = int(os.environ.get("FLATOUT_TEST_KILLS", "10"))
    counted = kill_at_random(tmp_path, kills, int(os.environ.get("FLATOUT_TEST_SEED", "1")))
    assert counted.total() >= kills
