"""Settings that do not go with world.strategy=fsdp."""

from __future__ import annotations

from flatout.errors import RecipeError
from flatout.recipe import SETTINGS, Recipe

_DDP = "train with world.strategy=ddp"
_LAYERS = "world.strategy=fsdp gathers weights around the calls of layers, which it would leave out"

LEFT_OUT = {
    "compute.fp32_operators": _LAYERS,
    "compute.memory_format": "world.strategy=fsdp cuts weights in their plain layout",
    "compute.rewrites": _LAYERS,
    "compute.fused_norms": _LAYERS,
    "compute.touched_rows": "world.strategy=fsdp steps all rows of the part that a rank has",
    "compute.compile": _LAYERS,
    "compute.capture": "that is for one rank on a CPU",
}
"""Settings that stay plain with world.strategy=fsdp, and why."""


def check_settings(requested: Recipe) -> None:
    """Refuse settings that were asked for by name and do not go with fsdp.

    Raises:
        RecipeError: naming one.
    """
    for field, why in LEFT_OUT.items():
        value = requested.get(field)
        if value not in ("auto", SETTINGS[field].plain):
            raise RecipeError(
                f"{field}={value} cannot be had: {why}", do=f"leave it out, or {_DDP}"
            )
    if requested.get("compute.precision") == "fp16":
        raise RecipeError(
            "world.strategy=fsdp does not scale losses as compute.precision=fp16 wants it",
            do="take compute.precision=bf16",
        )
    for field in ("world.reduction", "world.compression"):
        value = requested.get(field)
        if value not in ("auto", SETTINGS[field].plain):
            raise RecipeError(
                f"{field}={value} is about gradients that all ranks have whole, and "
                "world.strategy=fsdp leaves each rank a part",
                do=f"leave it out, or {_DDP}",
            )
