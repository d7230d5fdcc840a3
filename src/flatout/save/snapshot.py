"""Copies tensors to CPU memory, so that a thread can write them while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatout.values import view_key


class Snapshot:
    """Copies tensors into CPU buffers, which later copies reuse.

    New memory costs a page fault per 4 KiB, and pinned memory is slow to allocate. With reuse,
    only the first copy has these costs.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        buffers: dict[str, Tensor] = {}
        copied: dict[tuple[object, ...], str] = {}
        devices = set()
        # Outside of inference mode: a buffer made in it could not be written by a later copy.
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in tensors.items():
                first = copied.setdefault(view_key(tensor), name)
                if first == name:
                    buffers[name] = self._buffer(name, tensor)
                    buffers[name].copy_(tensor, non_blocking=tensor.is_cuda)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = buffers
        return {name: buffers[copied[view_key(tensor)]] for name, tensor in tensors.items()}

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and _alike(kept, tensor):
            return kept
        return torch.empty_like(
            tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False
        )


def _alike(buffer: Tensor, tensor: Tensor) -> bool:
    return (
        (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
        and buffer.stride() == tensor.stride()
        and (buffer.is_pinned() or not tensor.is_cuda)
    )
