"""What tensors hold, also where it was written past torch's count of their changes.

`tensor.data`, and arrays that share memory with a tensor, change it and not its `_version`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from flatout.kernels import available, crc32c

# Of the time, what looking again and again may take.
_SHARE = 0.01
# As which numbers values of so many bytes are added up.
_NUMBERS = {1: torch.uint8, 2: torch.int16}


class Contents:
    """Whether tensors hold what they held when this was made.

    Args:
        tensors: on any device.
        clock: returns seconds.

    Attributes:
        next_look: the time before which `seem_same` does not look again.
    """

    def __init__(
        self, tensors: Iterable[Tensor], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._tensors, self._clock = list(tensors), clock
        self._were, self.next_look = contents_of(self._tensors), 0.0

    def are_same(self) -> bool:
        """Read all of them, and wait for their device."""
        return contents_of(self._tensors) == self._were

    def seem_same(self) -> bool:
        """The same, asked at any time: in between, so that it takes no time, they seem to be."""
        began = self._clock()
        if began < self.next_look:
            return True
        result, now = self.are_same(), self._clock()
        self.next_look = now + (now - began) / _SHARE
        return result


def contents_of(tensors: Iterable[Tensor]) -> list[int]:
    """A number for each tensor, which nearly every change of its values changes.

    On a CPU a checksum, elsewhere, and without the C extensions, a sum that is waited for.
    """
    sums = [_sum_of(tensor) for tensor in tensors]
    there = [value for value in sums if torch.is_tensor(value)]
    read = iter(torch.stack(there).tolist() if there else ())
    return [next(read) if torch.is_tensor(value) else value for value in sums]


def _sum_of(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor._version
    values = tensor.detach()
    # As they lie in memory, so that none is copied.
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    flat = values.permute(order).reshape(-1)
    if not flat.numel():
        return 0
    if flat.device.type == "cpu" and available():
        return crc32c(flat.view(torch.uint8).numpy().data)
    return flat.view(_NUMBERS.get(flat.element_size(), torch.int32)).sum(dtype=torch.int64)
