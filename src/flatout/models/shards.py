"""Parameters of which each rank holds a part (torch's DTensor), read whole or by their part.

torch is not asked what a DTensor is: where none was made, that would import all of it.
"""

from __future__ import annotations

from typing import Any

import torch


def is_shard(tensor: Any) -> bool:
    """Whether this rank holds a part of it."""
    return hasattr(tensor, "full_tensor")


@torch.no_grad()
def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: a view; of one that is no shard, all."""
    parts: Any = tensor
    return parts.to_local() if is_shard(tensor) else tensor


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A shard put together, in its own memory: all ranks call it. Another tensor as it is."""
    parts: Any = tensor
    return parts.full_tensor() if is_shard(tensor) else tensor


@torch.no_grad()
def sharded_like(value: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A whole tensor, which all ranks have, laid over them as `shard` is; this rank keeps its part.

    What is a shard already, or `shard` is none, stays as it is.
    """
    if not is_shard(shard) or is_shard(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    parts: Any = shard
    on = value.to(own_part(shard).device)
    # None as the source: no rank sends anything.
    return distribute_tensor(on, parts.device_mesh, parts.placements, src_data_rank=None)
