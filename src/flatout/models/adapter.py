"""The place where a model is asked which framework made it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn

from flatout.models.keras.model import KerasModel
from flatout.models.rewrites import Rewrite
from flatout.models.torch_model import TorchModel
from flatout.recipe import ModelFacts


def adapter_of(model: nn.Module) -> TorchModel:
    """The model with what Flatout asks of it, answered as its framework does."""
    # Not imported here: which backend Keras takes is decided when the user imports it.
    kind = getattr(sys.modules.get("keras"), "Model", None)
    if kind is not None and isinstance(model, kind):
        return KerasModel(model)
    return TorchModel(model)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Everything that is saved of a model, by name; the tensors themselves."""
    return adapter_of(model).weights()


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Put into the model what `weights_of` gave; names and shapes have been checked."""
    adapter_of(model).load_weights(weights)


def find_rewrites(model: nn.Module) -> list[Rewrite]:
    """The rewrites that fit `model` in training. Looks only; changes nothing."""
    return adapter_of(model).rewrites()


def facts_of(model: nn.Module, device: str) -> ModelFacts:
    """What `flatout.recipe.of_change` needs to know about `model` on `device`."""
    own = adapter_of(model)
    return ModelFacts(
        batch_coupled=own.is_batch_coupled(),
        draws_random=own.draws_random(),
        device=device,
        rewrites_round=own.rewrites_round,
    )


def is_batch_coupled(model: nn.Module) -> bool:
    """Whether a sample's result depends on the other samples of its (micro-)batch."""
    return adapter_of(model).is_batch_coupled()


def calls_hooks(model: nn.Module) -> bool:
    """Whether calls of all its parts go through torch's hooks, as those of Keras' layers do not."""
    return all(adapter_of(part).calls_hooks for part in model.modules())
