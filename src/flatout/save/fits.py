"""Checks that loaded tensors fit a model, before any parameter is overwritten."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from flatout.errors import CheckpointError

# Levels that torch.compile, FSDP and activation checkpointing insert into names of parameters.
_LEVELS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# DDP: prefix of names in DataParallel and DistributedDataParallel. LIGHTNING: usual prefix of names
# in a LightningModule.
DDP = "module."
LIGHTNING = "model."
# Buffer in which torch's AveragedModel (EMA, SWA) counts its updates. All other names of an
# AveragedModel start with "module.".
AVERAGED = "n_averaged"

# Maximum number of keys of each kind that an error lists.
_SHOWN = 5


def check_fits(
    model_state: Mapping[str, Any], loaded: Mapping[str, Any], where: str | None = None
) -> None:
    """Compare a module's `state_dict()` with loaded tensors, by key and shape.

    Raises:
        CheckpointError: keys or shapes differ. The error counts missing and unexpected keys and
            keys with another shape, and lists the first of them. If only a wrapper's prefix
            differs, the error states this.
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


def without_levels(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return each name without the levels that wrappers insert, and the levels that were found."""
    plain: dict[str, str] = {}
    wrappers: set[str] = set()
    for name in names:
        levels = name.split(".")
        wrappers.update(level for level in levels if level in _LEVELS)
        plain[name] = ".".join(level for level in levels if level not in _LEVELS)
    return plain, [f"{level}." for level in _LEVELS if level in wrappers]


def all_begin(names: Iterable[str], prefix: str) -> bool:
    listed = list(names)
    return bool(listed) and all(name.startswith(prefix) for name in listed)


def is_averaged(names: Iterable[str]) -> bool:
    listed = set(names)
    return AVERAGED in listed and all_begin(listed - {AVERAGED}, DDP)
