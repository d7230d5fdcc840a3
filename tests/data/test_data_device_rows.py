"""Rows that lie on a device too are the same rows; here the device is the CPU's own memory."""

from threading import Event

import numpy as np
import pytest
import torch

from flatout.data.features import device_rows
from flatout.data.features.device_rows import features_give_way
from flatout.data.features.kept_rows import DeferredWriter
from flatout.data.features.row_log import RowLog, RowPart
from flatout.data.features.store import FeatureStore

ROW = [
    RowPart((4, 3, 5), torch.bfloat16, channels_last=True),
    RowPart((7,), torch.float32),
    RowPart((), torch.int64),
]
HERE = torch.device("cpu")


def values(slots):
    draw = torch.Generator().manual_seed(0)
    every = [torch.randn(100, *part.shape, generator=draw) * 100 for part in ROW]
    return [one[slots].to(part.dtype) for one, part in zip(every, ROW, strict=True)]


@pytest.fixture
def store():
    made = FeatureStore.open("device rows", 100, ROW, "memory")
    made.lie_on(HERE, parts=2, expected=100)
    made.put(np.arange(50), values(np.arange(50)))
    yield made
    made.close()


@pytest.fixture
def reads(monkeypatch):
    """Which parts were read from the log, by each call."""
    found = []
    read = RowLog.read

    def noted(log, places, buffers=None, which=slice(None)):
        found.append(which.start or 0)
        return read(log, places, buffers, which)

    monkeypatch.setattr(RowLog, "read", noted)
    return found


def check(store, slots):
    slots = np.array(slots)
    assert store.has(slots).all()
    for found, expected in zip(store.get(slots), values(slots), strict=True):
        assert torch.equal(found, expected)


def test_rows_are_read_from_the_log_once(store, reads):
    check(store, [7, 3, 3, 49])
    check(store, [3, 7])
    assert reads == [0, 2]  # the label, which does not lie there
    check(store, [3, 8])
    check(store, [8, 49, 8])
    assert reads == [0, 2, 0, 2]
    assert store.get(np.array([8, 7]))[0].is_contiguous(memory_format=torch.channels_last)


def test_rows_without_room_are_read_from_the_log(store, reads, monkeypatch):
    stride = sum(part.width for part in ROW[:2])
    monkeypatch.setattr(device_rows, "device_room", lambda device, share: 3 * stride)
    check(store, [1, 2])
    for _ in range(2):
        check(store, [1, 2])
        check(store, [2, 3, 4])  # of which one has room
    assert reads == [0, 2, 0, 2, 0]


def test_rows_that_left_the_device_come_again(store, reads):
    check(store, [1, 2])
    store.leave_device()
    check(store, [2, 1])
    check(store, [1, 2])
    assert reads == [0, 0, 2]


def test_rows_give_way_where_memory_runs_out(store, reads):
    check(store, [1, 2])
    assert features_give_way() > 0
    assert features_give_way() == 0
    check(store, [1, 2])
    check(store, [1, 2])
    assert reads == [0, 0, 0]


def test_rows_of_a_device_are_written_in_their_order_while_it_goes_on():
    later, begins, written = DeferredWriter(), Event(), []

    def write(copies):
        begins.wait()
        written.append(copies[0].tolist())

    value = torch.zeros(2)
    for number in range(3):
        value.fill_(number)
        later.write([number], [value], write)
    later.wait([7])  # which waits for nothing
    assert not written
    begins.set()
    later.wait([2])
    later.wait()
    assert written == [[0, 0], [1, 1], [2, 2]]


def test_what_kept_rows_from_being_written_is_told_once():
    later = DeferredWriter()

    def fail(copies):
        raise ValueError("of this row")

    later.write(["a"], [torch.zeros(1)], fail)
    with pytest.raises(ValueError, match="of this row"):
        later.wait()
    later.wait()
