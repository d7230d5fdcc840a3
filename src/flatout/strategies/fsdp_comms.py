"""What torch's `fully_shard` sends, noted as the World's own collectives.

So a rank that does not come is named, with what it is missing in, and waiting counts as such.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from flatout.world import World


class AllGatherOf(DefaultAllGather):
    """Gathers a block's weights.

    Args:
        world: of this rank.
        what: is gathered.
    """

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks' parts."""
        work = super().__call__(*args, **{**kwargs, "async_op": True})
        self._world.until(self._world.begun(work, self._what))


class ReduceScatterOf(DefaultReduceScatter):
    """Adds up a block's gradients, of which each rank gets its part.

    Args:
        world: of this rank.
        what: is added up.
    """

    def __init__(self, world: World, what: str) -> None:
        self._world, self._what = world, what

    def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Wait for the sum."""
        work = super().__call__(*args, **{**kwargs, "async_op": True})
        self._world.until(self._world.begun(work, self._what))
