"""Tables of bfloat16 whose lower 16 bits of float32 are kept separately, and reasons against it."""

from __future__ import annotations

import torch

from flatout.errors import ModelError
from flatout.models import adapter_of, table_weight
from flatout.recipe import Recipe, ResolvedRecipe
from flatout.train.loop_state import LoopState
from flatout.train.tables.row_tables import Tables

SPLIT = {"compute.touched_rows": "on", "compute.compile": "off"}
"""Values that lower halves require of open settings."""


def splits_tables(recipe: Recipe | ResolvedRecipe) -> bool:
    """Return whether lower halves of bfloat16 tables are requested."""
    return recipe.compute.bf16_tables == "split"


def check_split(loop: LoopState, resolved: ResolvedRecipe) -> None:
    """Raise if lower halves are requested and a bfloat16 table cannot be stepped with them."""
    if splits_tables(resolved) and (why := _why_not(loop, resolved)):
        raise ModelError(
            f"compute.bf16_tables=split is not possible: {why}",
            do="leave it out, so that each step rounds to bfloat16, or remove this obstacle",
        )


def _why_not(loop: LoopState, resolved: ResolvedRecipe) -> str:
    world = resolved.world
    if loop.asked_strategy and (world.strategy != "ddp" or world.tables != "replicated"):
        layout = f"world.strategy={world.strategy} with world.tables={world.tables}"
        return f"several ranks keep lower halves with replicated tables of ddp, not with {layout}"
    if resolved.compute.touched_rows != "on":
        return "compute.touched_rows=off steps tables whole"
    weights = {name: table_weight(module) for name, module, _ in adapter_of(loop.model).tables()}
    own = [name for name, weight in weights.items() if weight.dtype is torch.bfloat16]
    if not own:
        return "no embedding table of the model is bfloat16"
    tables = loop.stepper.switch.tables
    whole = (tables or Tables.of(loop.model, loop.optimizers, split=True)).whole
    hindered = [name for name in own if name in whole]
    return f"{hindered[0]} is stepped whole: {whole[hindered[0]]}" if hindered else ""
