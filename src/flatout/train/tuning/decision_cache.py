"""Cache of the settings that `auto` decided, by model, shapes, machine and request."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections import Counter
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

import torch

import flatout
from flatout.cache_folder import cache_folder, keep_text, kept_text, kind_folder
from flatout.data import Batch, named_tensors
from flatout.measure import fingerprint
from flatout.models import adapter_of
from flatout.recipe import PLAIN, Parity, Recipe, ResolvedRecipe, dumps, loads
from flatout.train.step import Stepper
from flatout.train.tuning.per_length_timing import ByLength
from flatout.world import place

_KIND = "auto"
# Ending of a second file next to a Recipe, if settings depend on the length of a step's batches.
_LENGTHS = ".lengths.json"
# Number of latest jobs on this machine whose settings decide the order of trials.
_LATEST = 16


def key(
    requested: Recipe, stepper: Stepper, batches: list[Batch], allow: Parity, steps: int | None
) -> str:
    """Return 24 hex digits that differ where the decision may differ."""
    model, optimizers = stepper.switch.model, stepper.switch.optimizers
    parts: dict[str, Any] = {
        "version": flatout.__version__,
        "machine": fingerprint().digest,
        "ranks": place().world_size,
        "process": [stepper.switch.now.allocator, torch.get_num_threads()],
        "model": adapter_of(model).structure(),
        "parameters": [(n, list(p.shape), p.requires_grad) for n, p in model.named_parameters()],
        "optimizers": [[type(o).__qualname__, *map(_options, o.param_groups)] for o in optimizers],
        "batches": [_shapes(batch) for batch in batches],
        "allow": allow.words,
        "requested": dumps(requested),
        # Compiling saves time only in long runs, so the key includes the run's order of magnitude.
        "steps": 0 if steps is None else len(str(steps)),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _options(group: dict[str, Any]) -> dict[str, str]:
    # The learning rate changes from step to step and does not affect the decision.
    return {k: str(v) for k, v in group.items() if k not in ("params", "lr", "initial_lr")}


def _shapes(batch: Batch) -> list[Any]:
    named = {"inputs": batch.inputs, "targets": batch.targets, "weight": batch.weight}
    return [
        (name, _shape(tensor, is_jagged=batch.is_jagged), str(tensor.dtype))
        for part, value in named.items()
        for name, tensor in named_tensors(part, value)
    ]


def _shape(tensor: torch.Tensor, *, is_jagged: bool) -> list[int]:
    if not is_jagged:
        return list(tensor.shape)
    return [size.bit_length() for size in tensor.shape]


class KeptSettings(NamedTuple):
    """A cached decision.

    Attributes:
        recipe: settings for batches of all lengths.
        by_length: settings for short and for long batches; None if all batches have the same
            settings.
        when: time of the decision.
    """

    recipe: ResolvedRecipe
    by_length: ByLength | None
    when: datetime


def read(name: str) -> KeptSettings | None:
    """Return a cached decision; None if there is none, or if it is damaged."""
    text, lengths = kept_text(_KIND, f"{name}.toml"), kept_text(_KIND, f"{name}{_LENGTHS}")
    path = cache_folder() / _KIND / f"{name}.toml"
    if text is None or (lengths is None and path.with_suffix(_LENGTHS).exists()):
        return None
    try:
        recipe = loads(text)
        by_length = None if lengths is None else ByLength.of(json.loads(lengths))
        when = datetime.fromtimestamp(path.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # settings are measured again
    return KeptSettings(recipe, by_length, when) if isinstance(recipe, ResolvedRecipe) else None


def chosen_here() -> Counter[str]:
    """Count, by field, the latest jobs on this machine with another value than the plain value."""
    votes: Counter[str] = Counter()
    try:
        kept = sorted((cache_folder() / _KIND).glob("*.toml"), key=lambda p: -p.stat().st_mtime)
        for path in kept[:_LATEST]:
            recipe = tomllib.loads(kept_text(_KIND, path.name) or "")
            votes.update(f for f, plain in PLAIN.items() if _differs(recipe, f, plain))
    except (OSError, ValueError):
        pass  # the order affects only the time of the search
    return votes


def _differs(recipe: dict[str, Any], field: str, plain: Any) -> bool:
    section, _, name = field.partition(".")
    return bool(recipe.get(section, {}).get(name, plain) != plain)


def write(name: str, resolved: ResolvedRecipe, by_length: ByLength | None = None) -> None:
    """Store a decision; a failure to write costs the next run a few seconds."""
    with suppress(OSError):
        lengths = f"{name}{_LENGTHS}"
        if by_length is None:
            (kind_folder(_KIND) / lengths).unlink(missing_ok=True)
        else:
            keep_text(_KIND, lengths, json.dumps(by_length.as_dict()))
        keep_text(_KIND, f"{name}.toml", dumps(resolved))
