"""Whether loaded tensors are those of a model, said before anything is overwritten."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from flatout.errors import CheckpointError
from flatout.save.names import AVERAGED, DDP, LIGHTNING, without_levels

_SHOWN = 5


def check_fits(
    model_state: Mapping[str, Any], loaded: Mapping[str, Any], where: str | None = None
) -> None:
    """Compare a module's `state_dict()` with loaded tensors, by key and shape.

    Raises:
        CheckpointError: lists missing, unexpected and differently shaped keys (the first few, with
            counts), and says so when only a wrapper's prefix differs.
    """
    missing = [key for key in model_state if key not in loaded]
    unexpected = [key for key in loaded if key not in model_state]
    shapes = [
        f"{key} is {_shape(loaded[key])}, the model has {_shape(model_state[key])}"
        for key in model_state
        if key in loaded and _shape(loaded[key]) != _shape(model_state[key])
    ]
    if not (missing or unexpected or shapes):
        return
    lines = ["the checkpoint is of another model:"]
    for words, keys in [
        ("missing from the checkpoint", missing),
        ("not in the model", unexpected),
        ("of another shape", shapes),
    ]:
        if keys:
            more = f", … {len(keys) - _SHOWN:,} more" if len(keys) > _SHOWN else ""
            lines.append(f"  {len(keys):,} {words}: {', '.join(keys[:_SHOWN])}{more}")
    raise CheckpointError("\n".join(lines), where=where, do=_cure(model_state, loaded, where))


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if hasattr(value, "shape") else None


def _cure(model: Collection[str], loaded: Collection[str], where: str | None) -> str:
    source = shlex.quote(where) if where and os.path.exists(where) else "CHECKPOINT"
    export = f"flatout export {source} plain.safetensors"
    if _unwrapped(loaded) == set(model):
        return f"only a wrapper's names differ: `{export}`, and load plain.safetensors"
    if set(loaded) == _unwrapped(model):
        return "only a wrapper's names differ: load into the module inside the wrapper"
    for prefix in (DDP, LIGHTNING):
        if {key.removeprefix(prefix) for key in set(loaded) - {AVERAGED}} == set(model):
            return (
                f"every key differs by {prefix!r} only: `{export} --prefix {prefix}`, "
                "and load plain.safetensors"
            )
        if {prefix + key for key in loaded} == set(model) - {AVERAGED}:
            return f"every key differs by {prefix!r} only: load into the module inside the wrapper"
    return "build the model as it was when the checkpoint was written"


def _unwrapped(names: Collection[str]) -> set[str]:
    return set(without_levels(names)[0].values())
