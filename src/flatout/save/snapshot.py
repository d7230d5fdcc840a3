"""A copy of tensors in CPU memory, which a thread may write while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flatout.values import view_key


class Snapshot:
    """Copies tensors into buffers that are kept from one copy to the next.

    Freshly mapped memory costs a page fault per 4 KiB, and page-locked memory is slow to make, so
    only the first copy pays for it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        buffers: dict[str, Tensor] = {}
        copied: dict[tuple[object, ...], str] = {}
        devices = set()
        # Leaving inference mode, because its tensors cannot be written to outside of it later.
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
