"""Warm start: weights and optimizer state of an earlier run, with new step count and schedule."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from flatout.models import load_weights, weights_of
from flatout.optim import align_state
from flatout.save import (
    TORCH_FILES,
    Checkpoints,
    LoadedCheckpoint,
    check_fits,
    is_checkpoint,
    is_model_file,
    load_weights_file,
)
from flatout.train.model_ids import ModelIds, make_room
from flatout.train.resume.same_job import check_optimizers
from flatout.train.signature import Signature, with_room


def warm_start(
    model: nn.Module, optimizer: torch.optim.Optimizer, source: str | Path
) -> tuple[str, Signature | None]:
    """Load weights and, from a checkpoint, the optimizer's state.

    The optimizer keeps its present options, such as the learning rate.
    """
    path = str(source).rstrip("/")
    if is_model_file(path) or path.endswith(TORCH_FILES):
        notes: list[str] = []
        weights, metadata = load_weights_file(path, notes.append)
        signature = with_room(metadata, path, model, optimizer)
        check_fits(weights_of(model), weights, where=path)
        load_weights(model, weights)
        return "\n".join([*notes, "warm start: weights kept, optimizer new"]), signature
    loaded = _load(path)
    state = loaded.state.get("ids")
    ids = (
        None if state is None else make_room(model, ModelIds.of_state(state, path), path, optimizer)
    )
    check_fits(weights_of(model), loaded.model, where=path)
    check_optimizers([optimizer], loaded.state)
    signature = Signature.of(loaded.metadata, path, ids)
    load_weights(model, loaded.model)
    groups = optimizer.state_dict()["param_groups"]
    (saved,) = loaded.state["optimizers"]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    align_state(optimizer)
    words = (
        f"warm start from step {loaded.step:,}: weights and optimizer kept, step and schedule reset"
    )
    return words, signature


def _load(path: str) -> LoadedCheckpoint:
    parent, _, name = path.rpartition("/")
    if is_checkpoint(name):
        return Checkpoints(parent or ".").load(name)
    return Checkpoints(path if name == "checkpoints" else f"{path}/checkpoints").load()
