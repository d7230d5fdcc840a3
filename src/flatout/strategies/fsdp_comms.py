"""What torch's `fully_shard` sends, noted as the World's own collectives.

So a rank that does not come is named, with what it is missing in, and waiting counts as such.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from flatout.world import World


class AllGatherOf(DefaultAllGather):
    """Gathers a block's weights."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks' parts."""
        work = super().__call__(*args, **{**kwargs, "async_op": True})
        self._world.until(self._world.begun(work, self._what))


class ReduceScatterOf(DefaultReduceScatter):
    """Adds up a block's gradients, of which each rank gets its part."""

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Wait for the sum."""
        work = super().__call__(*args, **{**kwargs, "async_op": True})
        self._world.until(self._world.begun(work, self._what))


def add_up_unused(block: Any) -> None:
    """Let the gradients of a block's unused parameters count as zeros.

    So all ranks add up equally many numbers, though some have not used a parameter that others
    have. torch before 2.13 leaves such gradients out, each rank by itself.
    """
    if hasattr(block, "set_reduce_scatter_unused_params"):
        block.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = block._get_fsdp_state()._fsdp_param_group
    if group is None:  # the block gathers no parameters
        return
    post_backward = group.post_backward

    def with_zeros(*unused: Any) -> None:
        for sharded in group.fsdp_params if group.reduce_grads else ():
            if (
                not hasattr(sharded, "_unsharded_param")
                or sharded.unsharded_accumulated_grad is not None
            ):
                continue
            parameter = sharded.unsharded_param
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        post_backward(*unused)

    group.post_backward = with_zeros
