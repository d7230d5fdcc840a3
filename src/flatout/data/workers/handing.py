"""Transfer of values between two processes by a pipe, with tensors in shared memory.

torch would share each tensor by a file in /dev/shm, and send its descriptor through a socket in a
temporary folder; a killed process may leave these files there. Here, one file without a name
holds all tensors of a value, and its descriptor goes through the pipe.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

# Bytes of a message that hold the size of its tensors.
_SIZE_BYTES = 8
# Alignment of each tensor in shared memory, in bytes.
_ALIGNED = 64


def send(pipe: Any, value: Any) -> None:
    """Send a value through a duplex pipe, whose other end only `receive` may read.

    Raises:
        OSError: the other end is closed, or there is not enough memory.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    if not pickler.size:
        pipe.send_bytes(bytes(_SIZE_BYTES) + file.getbuffer())
        return
    shared = os.memfd_create("flatout-batch", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(shared, 0, pickler.size)
        mapped = mmap.mmap(shared, pickler.size)
        for tensor, place in pickler.tensors:
            _at(place, mapped).copy_(tensor)
        pipe.send_bytes(pickler.size.to_bytes(_SIZE_BYTES, "little") + file.getbuffer())
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
            reduction.sendfds(way, [shared])
    finally:
        os.close(shared)


def receive(pipe: Any) -> Any:
    """Wait for the next value that `send` has sent, and return it."""
    data = memoryview(pipe.recv_bytes())
    size = int.from_bytes(data[:_SIZE_BYTES], "little")
    mapped = _received(pipe, size) if size else None
    return _Unpickler(io.BytesIO(data[_SIZE_BYTES:]), mapped).load()


def _received(pipe: Any, size: int) -> mmap.mmap:
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
        try:
            (shared,) = reduction.recvfds(way, 1)
        # the other process ended after sending the value, before sending the descriptor
        except RuntimeError as error:
            raise EOFError from error
    try:
        return mmap.mmap(shared, size)
    finally:
        os.close(shared)


# Position of a tensor: its dtype, its shape, its strides, and its first byte.
_Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]


def _at(place: _Place, mapped: mmap.mmap) -> Tensor:
    dtype, shape, strides, start = place
    count = (len(mapped) - start) // dtype.itemsize
    flat = torch.frombuffer(mapped, dtype=dtype, offset=start, count=count)
    return flat.as_strided(shape, strides)


class _Pickler(pickle.Pickler):
    """Pickles a value without its tensors, and assigns a position in the file to each tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[Tensor, _Place]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> _Place | None:
        if not _is_plain(value):
            return None
        # Strides as in memory, such as channels last, but without gaps and repeated elements.
        strides = torch.empty_like(value, device="meta").stride()
        place = value.dtype, tuple(value.shape), strides, self.size
        self.tensors.append((value, place))
        self.size += -(-value.numel() * value.element_size() // _ALIGNED) * _ALIGNED
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, mapped: mmap.mmap | None) -> None:
        super().__init__(file)
        self._mapped = mapped

    def persistent_load(self, place: _Place) -> Tensor:
        assert self._mapped is not None
        return _at(place, self._mapped)


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.numel() == 0)
        and hasattr(os, "memfd_create")
    )
