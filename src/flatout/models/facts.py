"""Facts about a model that decide what a change of settings does to its result."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from flatout.models import keras_model
from flatout.recipe import ModelFacts


def is_batch_coupled(model: nn.Module) -> bool:
    """Whether a sample's result depends on the other samples of its (micro-)batch."""
    if keras_model.is_keras(model):
        return keras_model.is_batch_coupled(model)
    return any(
        isinstance(m, _BatchNorm) and (m.training or not m.track_running_stats)
        for m in model.modules()
    )


def draws_random(model: nn.Module) -> bool:
    """Whether a training step draws random numbers inside the model."""
    if keras_model.is_keras(model):
        return keras_model.draws_random(model)
    return any(
        (isinstance(m, _DropoutNd) and m.p > 0)
        or isinstance(m, nn.RReLU)
        or (isinstance(m, (nn.RNNBase, nn.MultiheadAttention)) and m.dropout > 0)
        for m in model.modules()
    )


def uses_convolution(model: nn.Module) -> bool:
    """Whether the model has 2-D convolutions, which care for the memory format."""
    return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())


def facts_of(model: nn.Module, device: str) -> ModelFacts:
    """What `flatout.recipe.of_change` needs to know about `model` on `device`."""
    return ModelFacts(
        batch_coupled=is_batch_coupled(model),
        draws_random=draws_random(model),
        device=device,
        rewrites_round=keras_model.is_keras(model),
    )
