"""Copies of batches to a device before they are needed.

A thread takes the next batches, copies them into pinned memory, and from there to the device on its
own stream, while the batch before is computed. torch's caching host allocator makes the pinned
memory a ring: a block is reused once the copies that read it are done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.data.batches.batch import Batch
from flatout.data.workers.parallel import Ahead, Tuner


class _Copied(NamedTuple):
    batch: Batch
    event: Any


class _Copier:
    """Copies batches to a device. On a CPU, the same steps run without stream and pinning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def start(self, batch: Batch) -> _Copied:
        if self._stream is None:
            return _Copied(batch.with_tensors(torch.clone), None)
        if any(tensor.device == self._device for tensor in batch.tensors()):
            # Tensors already on the device, such as features, come from the current stream.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            copied = batch.with_tensors(self._copy)
            event = self._stream.record_event()
        return _Copied(copied, event)

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def finish(self, copied: _Copied) -> Batch:
        """Let the device's current stream wait for the copy; called by the training thread."""
        if copied.event is not None:
            here = torch.accelerator.current_stream(self._device)
            here.wait_event(copied.event)
            for tensor in copied.batch.tensors():
                # Otherwise the allocator would reuse the memory while this stream still reads it.
                tensor.record_stream(here)
        return copied.batch


def prefetch(batches: Iterator[Batch], device: torch.device, depth: int = 2) -> Iterator[Batch]:
    """Yield the same batches on `device`, copied up to `depth` ahead.

    Args:
        batches: iterator of batches, which another thread reads.
        device: device for the batches; for a CPU, batches are copied too.
        depth: number of batches that are copied at once; 2 is double buffering.
    """
    copier = _Copier(device)

    def following(step: int) -> _Copied | None:
        batch = next(batches, None)
        return None if batch is None else copier.start(batch)

    ahead = Ahead(following, 0, 2**62, Tuner(1, threads=1, depth=depth))
    for copied in ahead:
        if copied is None:
            return
        yield copier.finish(copied)
