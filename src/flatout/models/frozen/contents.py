"""Detection of changed tensor contents, including changes that torch's version counter misses.

Code that writes through `tensor.data`, or through arrays that share memory with a tensor, does not
change the tensor's `_version`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from flatout.kernels import available, crc32c

# Maximum fraction of the elapsed time that repeated reads of the tensors may take.
_SHARE = 0.01
# Integer dtype, by bytes of an element, in which the values' bits are summed.
_NUMBERS = {1: torch.uint8, 2: torch.int16}


class Contents:
    """A check whether tensors still hold the values that they had when this object was created.

    Args:
        tensors: tensors on any device.
        clock: returns seconds.

    Attributes:
        next_look: the time, in seconds of `clock`, before which `seem_same` does not read the
            tensors again.
    """

    def __init__(
        self, tensors: Iterable[Tensor], clock: Callable[[], float] = perf_counter
    ) -> None:
        self._tensors, self._clock = list(tensors), clock
        self._were, self.next_look = contents_of(self._tensors), 0.0

    def are_same(self) -> bool:
        """Read all tensors, wait for their devices, and return whether they are unchanged."""
        return contents_of(self._tensors) == self._were

    def seem_same(self) -> bool:
        """Return whether the tensors are unchanged, at little cost.

        The tensors are read rarely, to save time. Between two reads the result is True.
        """
        began = self._clock()
        if began < self.next_look:
            return True
        result, now = self.are_same(), self._clock()
        self.next_look = now + (now - began) / _SHARE
        return result


def contents_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor that nearly every change of its values changes.

    On a CPU the number is a checksum. On other devices, and without the C extensions, it is a sum,
    for which the host waits.
    """
    sums = [_sum_of(tensor) for tensor in tensors]
    there = [value for value in sums if torch.is_tensor(value)]
    read = iter(torch.stack(there).tolist() if there else ())
    return [next(read) if torch.is_tensor(value) else value for value in sums]


def _sum_of(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor._version
    values = tensor.detach()
    # In memory order, so that nothing is copied.
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    flat = values.permute(order).reshape(-1)
    if not flat.numel():
        return 0
    if flat.device.type == "cpu" and available():
        return crc32c(flat.view(torch.uint8).numpy().data)
    return flat.view(_NUMBERS.get(flat.element_size(), torch.int32)).sum(dtype=torch.int64)
