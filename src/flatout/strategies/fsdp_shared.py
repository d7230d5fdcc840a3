"""What torch's `fully_shard` sends, through memory that the ranks of one node share.

Weights are copied once more than within a rank, and gradients are added up where the others have
put them. Through sockets the same numbers are copied several times more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from flatout.strategies.reductions.shared import add_in_order
from flatout.world import Mailbox, World


class SharedAllGather(DefaultAllGather):
    """Gathers a block's weights."""

    def __init__(self, world: World, mailbox: Mailbox, what: str) -> None:
        self._world, self._mailbox, self._what = world, mailbox, what

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        """Give this rank's part, which stands in the output, and take the others'."""
        length = input_tensor.nbytes
        self._mailbox.room(length).copy_(input_tensor.view(torch.uint8))
        with self._world.within(self._world.begun(None, self._what)):
            boxes = self._mailbox.meet()
        for rank, part in enumerate(output_tensor.chunk(self._world.size)):
            if rank != self._world.rank:
                part.copy_(boxes[rank][:length].view(part.dtype))


class SharedReduceScatter(DefaultReduceScatter):
    """Adds up a block's gradients, of which each rank gets its part."""

    def __init__(self, world: World, mailbox: Mailbox, what: str) -> None:
        self._world, self._mailbox, self._what = world, mailbox, what
        self._is_input = False

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for what is added up, which others see, and in turn for the sum."""
        self._is_input = not self._is_input
        if not self._is_input:
            return super().allocate(size, dtype=dtype, device=device)
        return self._mailbox.room(math.prod(size) * dtype.itemsize).view(dtype)

    def __call__(  # type: ignore[override]
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        """Add up this rank's part of what all have."""
        with self._world.within(self._world.begun(None, self._what)):
            boxes = self._mailbox.meet()
        length = output_tensor.nbytes
        own = slice(length * self._world.rank, length * (self._world.rank + 1))
        add_in_order([box[own].view(output_tensor.dtype) for box in boxes], output_tensor)
