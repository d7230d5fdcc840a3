"""Sharding of a job's tables over its ranks, and reasons against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from flatout.data import Batch
from flatout.errors import ModelError
from flatout.models import adapter_of, row_tables, table_weight, unwatch_table, watch_table
from flatout.optim import ByRow, RowShards, optimizer_adapter, steppable_rows, why_read_whole
from flatout.recipe import Recipe, ResolvedRecipe
from flatout.train.loop_state import LoopState
from flatout.train.losses.loss_value import Compute, mean_of_value
from flatout.train.snapshot import untouched
from flatout.world import World

SHARDED = {"compute.touched_rows": "on", "compute.compile": "off"}
"""Values that sharded tables require of open settings."""


def shards_tables(recipe: Recipe | ResolvedRecipe, world: World) -> bool:
    """Return whether sharding is requested; a single rank has all rows."""
    return recipe.world.tables == "sharded" and world.size > 1


def shards_of(loop: LoopState, resolved: ResolvedRecipe) -> RowShards | None:
    """Return the shards of a job whose settings are decided; None if they are not requested."""
    if not shards_tables(resolved, loop.world):
        return None
    why = _why_not(loop, resolved)
    if why:
        raise ModelError(
            f"world.tables=sharded is not possible: {why}",
            do="train with world.tables=replicated, or remove this obstacle",
        )
    return RowShards(loop.world)


def _why_not(loop: LoopState, resolved: ResolvedRecipe) -> str:
    if resolved.world.strategy == "fsdp":
        return "world.strategy=fsdp gives each rank a part of every weight already"
    if resolved.world.strategy != "ddp":
        return f"sharded tables need world.strategy=ddp, not {resolved.world.strategy}"
    if loop.device.type != "cpu":
        return f"tables are stepped by rows on CPUs, and this rank computes on {loop.device}"
    if resolved.compute.touched_rows != "on":
        return "compute.touched_rows=off steps tables whole"
    if resolved.compute.bf16_tables == "split":
        return "compute.bf16_tables=split keeps all rows on every rank"
    if resolved.compute.precision == "fp16":
        return "compute.precision=fp16 scales the loss on each rank by itself"
    if resolved.memory.activation_checkpointing == "on":
        return "memory.activation_checkpointing=on looks rows up again in the backward pass"
    if resolved.compute.compile == "on":
        return "compute.compile=on makes one graph of what ranks do together"
    if any(optimizer_adapter(optimizer).clips_itself for optimizer in loop.optimizers):
        return "the optimizer is Keras', which clips the gradients of all rows itself"
    if own := [optimizer for optimizer in loop.optimizers if isinstance(optimizer, ByRow)]:
        return f"{type(own[0]).__name__} steps rows itself, with its state on every rank"
    for name, module in loop.model.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            return f"{name} has scale_grad_by_freq, which would count ids in each rank's part alone"
    return ""


def read_whole(
    loop: LoopState, compute: Compute | None, first: Sequence[Batch]
) -> dict[torch.Tensor, str]:
    """Find tables that forward and loss read whole, with reasons, before tables are sharded.

    Such a table cannot be sharded. It stays on every rank and is stepped whole. All ranks call this
    function.
    """
    result: dict[torch.Tensor, str] = {}
    if compute is not None and first:
        result = loop.stepper.look(first[0], lambda pieces: _read_by(loop, compute, pieces[0]))
    tables = {name: table_weight(module) for name, module, _ in adapter_of(loop.model).tables()}
    own = {name: result[weight] for name, weight in tables.items() if weight in result}
    each = loop.world.gather(own, "tables that are read whole")
    return {tables[name]: why for of_rank in reversed(each) for name, why in of_rank.items()}


def _read_by(loop: LoopState, compute: Compute, batch: Batch) -> dict[torch.Tensor, str]:
    steppable = steppable_rows(loop.optimizers, row_tables(loop.model)[0])
    reads_of = {weight: _Reads() for own in steppable.values() for weight in own}
    with untouched(loop.model, compute), torch.enable_grad():
        with _seeing(reads_of):
            loss, _ = mean_of_value(compute(batch), batch.size)
        whole = [weight for weight, reads in reads_of.items() if reads.is_whole]
        result = torch.autograd.grad(loss, whole, allow_unused=True) if whole else ()
    gradients = dict(zip(whole, result, strict=True))
    return {
        weight: why_read_whole(optimizer, weight, gradients[weight], reads_of[weight].rows)
        for optimizer, own in steppable.items()
        for weight in own
        if weight in gradients
    }


class _Reads:
    """Records whether lookups or other operators read a table."""

    def __init__(self) -> None:
        self.is_whole = False
        self.rows: list[torch.Tensor] = []

    def by_rows(self, ids: torch.Tensor) -> None:
        self.rows.append(ids.detach().reshape(-1))

    def whole(self) -> None:
        self.is_whole = True


@contextmanager
def _seeing(seen: dict[nn.Parameter, _Reads]) -> Iterator[None]:
    for weight, reads in seen.items():
        watch_table(weight, reads)
    try:
        yield
    finally:
        for weight in seen:
            unwatch_table(weight)
