import threading
import time

import pytest
import torch
from data_made_up import MadeUp, same

from flatout.data.pipeline import Pipeline
from flatout.data.workers.prefetch import prefetch


def batches(count=6):
    return Pipeline(MadeUp(8 * count)).shuffle(seed=1).batch(8).batches(0)


def test_the_same_batches_come_in_the_same_order():
    assert all(map(same, prefetch(batches(), torch.device("cpu")), batches()))


def test_they_are_copies():
    whole = list(batches())
    for ours, theirs in zip(prefetch(iter(whole), torch.device("cpu")), whole, strict=True):
        assert ours.inputs["x"].data_ptr() != theirs.inputs["x"].data_ptr()


def test_no_more_are_on_their_way_than_asked_for():
    taken = []

    def counted():
        for batch in batches(20):
            taken.append(1)
            yield batch

    ahead = prefetch(counted(), torch.device("cpu"), depth=2)
    for number in range(1, 8):
        next(ahead)
        time.sleep(0.02)
        assert len(taken) <= number + 2
    ahead.close()


def test_errors_come_in_their_place_and_threads_end():
    def broken():
        yield from batches(3)
        raise ValueError("torn")

    before = threading.active_count()
    taken = []
    with pytest.raises(ValueError, match="torn"):
        taken.extend(prefetch(broken(), torch.device("cpu")))
    assert len(taken) == 3
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


@pytest.mark.gpu
def test_batches_are_on_the_gpu_and_right():
    device = torch.device("cuda")
    for ours, theirs in zip(prefetch(batches(50), device), batches(50), strict=True):
        assert ours.inputs["x"].device.type == "cuda"
        # Work on this stream at once: it must have waited for the copy.
        assert torch.equal((ours.inputs["x"] * 2).cpu(), theirs.inputs["x"] * 2)
