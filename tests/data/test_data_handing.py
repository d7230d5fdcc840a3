"""Values from one process to another: their tensors lie in memory that both see."""

import os
import socket

import pytest
import torch

from flatout.data.workers import worker


@pytest.fixture
def ends():
    one, other = torch.multiprocessing.get_context("spawn").Pipe()
    yield one, other
    one.close()
    other.close()


def through(ends, value):
    worker.send(ends[0], value)
    return worker.receive(ends[1])


def test_a_value_comes_as_it_was_sent(ends):
    value = {"x": torch.arange(6).reshape(2, 3), "words": ["a"], "y": (torch.zeros(0, 4), None)}
    found = through(ends, value)
    assert torch.equal(found["x"], value["x"])
    assert found["words"] == ["a"]
    assert found["y"][0].shape == (0, 4)
    assert found["y"][1] is None
    assert through(ends, "next") == "next"


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16),
        *(torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn),
    ],
)
def test_dtypes(ends, dtype):
    value = torch.tensor([0, 1, 1]).to(dtype)
    found = through(ends, [torch.ones(3, dtype=torch.uint8), value])[1]
    assert found.dtype == dtype
    assert found.tolist() == value.tolist()


def test_layouts(ends):
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = through(ends, images)
    assert torch.equal(found, images)
    assert found.is_contiguous(memory_format=torch.channels_last)
    for value in (images[:, 1:, ::2], torch.rand(3, 1).expand(3, 7), torch.tensor(5.0)):
        assert torch.equal(through(ends, value), value)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(through(ends, sparse).to_dense(), torch.eye(3))
    wanted = torch.ones(2, requires_grad=True)
    assert through(ends, wanted).requires_grad


def test_what_came_can_be_written_to_and_no_descriptor_stays_open(ends):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        found = through(ends, [torch.zeros(5), torch.ones(3)])
        found[0] += 1
        found[1] *= 2
        assert [one.tolist() for one in found] == [[1.0] * 5, [2.0] * 3]
    del found
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_sent_leaves_the_pipe_as_it_was(ends):
    with pytest.raises((AttributeError, TypeError)):
        worker.send(ends[0], (torch.zeros(2), lambda: None))
    assert through(ends, 1) == 1


def test_an_end_between_a_value_and_its_memory_is_one(ends):
    ends[0].send_bytes((64).to_bytes(8, "little") + b"anything")
    with socket.fromfd(ends[0].fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
        way.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        worker.receive(ends[1])
