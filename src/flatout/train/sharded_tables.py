"""Whether tables of a job are sharded over its ranks, and what hinders that."""

from __future__ import annotations

from flatout.errors import ModelError
from flatout.models import KerasOptimizer
from flatout.optim import ByRow, RowShards
from flatout.recipe import Recipe, ResolvedRecipe
from flatout.train.loop_state import LoopState
from flatout.world import World

SHARDED = {"compute.touched_rows": "on", "compute.compile": "off"}
"""What sharded tables need of settings that are left open."""


def shards_tables(recipe: Recipe | ResolvedRecipe, world: World) -> bool:
    """Whether that is asked for; one rank has all rows."""
    return recipe.world.tables == "sharded" and world.size > 1


def shards_of(loop: LoopState, resolved: ResolvedRecipe) -> RowShards | None:
    """What shards the tables of a job that is decided, where that is asked for.

    Raises:
        ModelError: it is asked for, and something hinders it.
    """
    if not shards_tables(resolved, loop.world):
        return None
    why = _why_not(loop, resolved)
    if why:
        raise ModelError(
            f"world.tables=sharded was asked for, and {why}",
            do="train with world.tables=replicated, or change that",
        )
    return RowShards(loop.world)


def _why_not(loop: LoopState, resolved: ResolvedRecipe) -> str:
    if resolved.world.strategy == "fsdp":
        return "world.strategy=fsdp gives each rank a part of every weight already"
    if resolved.world.strategy != "ddp":
        return f"that is for world.strategy=ddp, not {resolved.world.strategy}"
    if loop.device.type != "cpu":
        return f"tables are stepped by rows on CPUs, and this rank computes on {loop.device}"
    if resolved.compute.touched_rows != "on":
        return "compute.touched_rows=off steps tables whole"
    if resolved.compute.precision == "fp16":
        return "compute.precision=fp16 scales the loss on each rank by itself"
    if resolved.memory.activation_checkpointing == "on":
        return "memory.activation_checkpointing=on looks rows up again in the backward pass"
    if resolved.compute.compile == "on":
        return "compute.compile=on makes one graph of what ranks do together"
    if any(isinstance(optimizer, KerasOptimizer) for optimizer in loop.optimizers):
        return "the optimizer is Keras', which clips the gradients of all rows itself"
    if own := [one for one in loop.optimizers if isinstance(one, ByRow)]:
        return f"{type(own[0]).__name__} steps rows itself, with its state on every rank"
    for name, module in loop.model.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            return f"{name} has scale_grad_by_freq, which would count ids in each rank's part alone"
    return ""
