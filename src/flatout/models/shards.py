"""Access to parameters that are sharded over ranks (torch's DTensor): whole, or this rank's shard.

The module recognizes a DTensor without importing torch's package for it, which may not be loaded.
"""

from __future__ import annotations

from typing import Any

import torch


def is_shard(tensor: Any) -> bool:
    """Return whether this rank holds only a part of a tensor."""
    return hasattr(tensor, "full_tensor")


@torch.no_grad()
def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of this rank's part of a tensor: the whole tensor if it is not sharded."""
    parts: Any = tensor
    return parts.to_local() if is_shard(tensor) else tensor


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a shard's whole tensor (all ranks call this), or another tensor unchanged."""
    parts: Any = tensor
    return parts.full_tensor() if is_shard(tensor) else tensor


@torch.no_grad()
def sharded_like(value: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Distribute a whole tensor, which all ranks have, as `shard` is, and return this rank's part.

    Return `value` unchanged if it is a shard already, or if `shard` is not a shard.
    """
    if not is_shard(shard) or is_shard(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    parts: Any = shard
    on = value.to(own_part(shard).device)
    # With None as the source rank, no rank sends anything.
    return distribute_tensor(on, parts.device_mesh, parts.placements, src_data_rank=None)
