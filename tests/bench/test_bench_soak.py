"""Growth of a job's resources over many epochs."""

import pytest

import soak


def epochs(count, **grows):
    """Return epochs of a rank in which some figures grow by a number in each epoch."""
    start = dict.fromkeys((*soak.HELD, "uss"), 100)
    return [{k: v + n * grows.get(k, 0) for k, v in start.items()} for n in range(count)]


def test_growth_is_reported_and_small_changes_are_not():
    assert not any(soak.grown(epochs(16)).values())
    assert soak.grown(epochs(16, processes=1))["processes"] > 0
    assert soak.grown(epochs(16, uss=1 << 20))["uss"] == 0
    assert soak.grown(epochs(16, uss=4 << 20))["uss"] > 0
    assert soak.grown(epochs(5)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipeline", "dataset"])
def test_no_process_is_left_after_each_epoch_on_two_ranks(kind):
    for held in soak.soak(kind, 2, 1.0):
        assert len(held) >= 8
        assert max(one["processes"] for one in held) <= 2  # one worker to train, one to validate
        assert held[-1]["descriptors"] <= held[2]["descriptors"]
        assert held[-1]["shm"] <= held[2]["shm"]
