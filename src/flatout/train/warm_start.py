"""Warm start: yesterday's weights and optimiser state, today's steps and schedule."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from flatout.save.checkpoint import Checkpoints
from flatout.save.fits import check_fits
from flatout.save.model_file import load_model


def warm_start(model: nn.Module, optimizer: torch.optim.Optimizer, source: str | Path) -> str:
    """Load weights and, from a checkpoint, the optimiser's state; returns in words what was kept.

    The optimiser's options (learning rate and so on) are those it was made with now.

    Args:
        model: gets the weights in place.
        optimizer: gets the state tensors in place.
        source: a run folder, its checkpoints folder, or a model file.

    Raises:
        CheckpointError: if there is none, it is damaged, or it belongs to another model.
    """
    path = str(source)
    if path.endswith(".safetensors"):
        weights = load_model(path)
        check_fits(model.state_dict(), weights)
        model.load_state_dict(weights)
        return "warm start: weights kept, optimiser new"
    loaded = Checkpoints(f"{path.removesuffix('/checkpoints')}/checkpoints").load()
    check_fits(model.state_dict(), loaded.model)
    model.load_state_dict(loaded.model)
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    optimizer.load_state_dict(loaded.state["optimizer"])
    for group, now in zip(optimizer.param_groups, options, strict=True):
        group.update(now)
    return (
        f"warm start from step {loaded.step:,}: weights and optimiser kept, step and schedule anew"
    )
