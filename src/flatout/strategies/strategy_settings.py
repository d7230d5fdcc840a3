"""Settings that do not work with a strategy."""

from __future__ import annotations

from flatout.errors import RecipeError
from flatout.recipe import SETTINGS, Recipe
from flatout.world import servers

_DDP = "train with world.strategy=ddp"
_GATHERED = (
    "world.strategy=fsdp gathers weights around the calls of layers, which it would leave out"
)
_CALLED = "world.strategy=staged calls layers from its own graph"
_ONE_RANK = "that is for one rank on a CPU"
_IN_PARTS = "no rank has all of a gradient that others have, too"
_TO_SERVERS = "gradients go to servers"

LEFT_OUT: dict[str, dict[str, str]] = {
    "fsdp": {
        "compute.fp32_operators": _GATHERED,
        "compute.memory_format": "world.strategy=fsdp cuts weights in their plain layout",
        "compute.rewrites": _GATHERED,
        "compute.fused_norms": _GATHERED,
        "compute.touched_rows": "world.strategy=fsdp steps all rows of the part that a rank has",
        "compute.compile": _GATHERED,
        "compute.capture": _ONE_RANK,
    },
    "staged": {
        "compute.precision": "world.strategy=staged takes fp32, or what is asked for",
        "compute.fp32_operators": _CALLED,
        "compute.memory_format": "world.strategy=staged sends what crosses in its plain layout",
        "compute.rewrites": _CALLED,
        "compute.fused_norms": _CALLED,
        "compute.touched_rows": "world.strategy=staged steps whole weights",
        "compute.compile": _CALLED,
        "compute.capture": _ONE_RANK,
    },
    "parameter_server": {
        "compute.memory_format": "servers step weights where they lie, and these would be moved",
        "compute.touched_rows": "servers step all rows of their share",
        "compute.capture": _ONE_RANK,
    },
}
"""By strategy, the settings that stay plain with it, with the reason."""

# The same for settings whose default is plain anyway.
_REFUSED: dict[str, dict[str, str]] = {
    "fsdp": {"world.reduction": _IN_PARTS, "world.compression": _IN_PARTS},
    "staged": {
        "compute.dropout": "a stage does not know which samples it has",
        "memory.activation_checkpointing": _CALLED,
        "world.reduction": _IN_PARTS,
        "world.compression": _IN_PARTS,
        "world.tables": "each table is on the rank of its stage",
    },
    "parameter_server": {
        "world.reduction": _TO_SERVERS,
        "world.compression": _TO_SERVERS,
        "world.tables": "servers step all weights",
    },
}

# Settings that work with only one strategy, and their subject for the message.
_ONLY_WITH = (
    ("world.staleness", "parameter_server", "parameter servers"),
    ("world.servers", "parameter_server", "parameter servers"),
    ("world.stages", "staged", "ranks that have some layers each"),
)

# A value of a refused setting that works with the strategy.
_FITS = {("fsdp", "world.reduction"): "shared"}


def check_settings(requested: Recipe) -> None:
    """Refuse settings that were asked for by name and do not work with the strategy."""
    strategy = requested.world.strategy
    there = servers.apart()
    if there is not None:
        _check_apart(requested, there.size)
    for field, wanted, what in _ONLY_WITH:
        value = requested.get(field)
        if value != SETTINGS[field].plain and strategy != wanted:
            raise RecipeError(
                f"{field}={value} is about {what}, and world.strategy={strategy} has none",
                do=f"leave it out, or set world.strategy={wanted}",
            )
    spare, staleness = requested.world.spare_workers, requested.world.staleness
    if spare and (strategy != "parameter_server" or staleness != "sync"):
        raise RecipeError(
            f"world.spare_workers={spare} is about servers that wait for gradients, and "
            f"world.strategy={strategy} with world.staleness={staleness} has none",
            do="leave it out, or set world.strategy=parameter_server and world.staleness=sync",
        )
    if strategy not in LEFT_OUT:
        return
    for field, why in {**LEFT_OUT[strategy], **_REFUSED[strategy]}.items():
        value = requested.get(field)
        fits = ("auto", SETTINGS[field].plain, _FITS.get((strategy, field)))
        if field != "compute.precision" and value not in fits:
            raise RecipeError(
                f"{field}={value} cannot be had: {why}", do=f"leave it out, or {_DDP}"
            )
    if requested.get("compute.precision") == "fp16":
        raise RecipeError(
            f"world.strategy={strategy} does not scale losses as compute.precision=fp16 wants it",
            do="take compute.precision=bf16",
        )
    if strategy == "staged" and isinstance(requested.get("memory.micro_batch"), int):
        raise RecipeError(
            "memory.micro_batch is how many samples a rank takes at once, and with "
            "world.strategy=staged world.micro_batches says into how many parts a batch is split",
            do="set world.micro_batches in its place",
        )


def _check_apart(requested: Recipe, count: int) -> None:
    asked = requested.world
    if asked.strategy != "parameter_server":
        raise RecipeError(
            f"flatout run --servers {count} has started servers, and "
            f"world.strategy={asked.strategy} has none",
            do="set world.strategy=parameter_server, or leave --servers out",
        )
