"""Whether a model takes a batch as it is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatout.data.batch import Batch
from flatout.train.compute import call
from flatout.train.evaluate import evaluating
from flatout.train.snapshot import untouched


def takes(model: nn.Module, batch: Batch) -> bool:
    """Whether the model's forward comes to an end with these inputs, tried without a trace."""
    parameters = list(model.parameters())
    if any(map(is_lazy, [*parameters, *model.buffers()])):
        return False
    device = parameters[0].device if parameters else torch.device("cpu")
    with untouched(model), evaluating(model):
        try:
            call(model, batch.to(device).inputs)
        except Exception:  # whatever a model raises at inputs that it does not take
            return False
    return True
