"""The all-reduce of gloo or NCCL, whatever it does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group


class AllReduce(Reduction):
    """Leaves it to the library."""

    is_exact = True

    def __init__(self, group: Group) -> None:
        self.group = group

    def add_up(self, flat: Flat) -> None:
        """In one call, which returns when it is done."""
        dist.all_reduce(flat.values, group=self.group.channel)

    def begin(self, flat: Flat) -> Any:
        """The same in the library's own threads; returns something to `wait()` for."""
        return dist.all_reduce(flat.values, group=self.group.channel, async_op=True)
