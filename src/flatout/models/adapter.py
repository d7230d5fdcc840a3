"""Selection of the adapter for a model's framework."""

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
    """Return the adapter of the model's framework."""
    # Keras is not imported here, because it chooses its backend when the user imports it.
    kind = getattr(sys.modules.get("keras"), "Model", None)
    if kind is not None and isinstance(model, kind):
        return KerasModel(model)
    return TorchModel(model)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a model that a checkpoint saves, by name, without copies."""
    return adapter_of(model).weights()


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load the output of `weights_of` into the model; names and shapes have been checked."""
    adapter_of(model).load_weights(weights)


def find_rewrites(model: nn.Module) -> list[Rewrite]:
    """Return the rewrites that fit `model` in training. Changes nothing."""
    return adapter_of(model).rewrites()


def facts_of(model: nn.Module, device: str) -> ModelFacts:
    """Return the facts about `model` on `device` that `flatout.recipe.of_change` needs."""
    own = adapter_of(model)
    return ModelFacts(
        batch_coupled=own.is_batch_coupled(),
        draws_random=own.draws_random(),
        device=device,
        rewrites_round=own.rewrites_round,
    )


def is_batch_coupled(model: nn.Module) -> bool:
    """Return whether a sample's result depends on the other samples of its (micro-)batch."""
    return adapter_of(model).is_batch_coupled()


def calls_hooks(model: nn.Module) -> bool:
    """Return whether calls of all modules run torch's hooks. Calls of Keras' layers run none."""
    return all(adapter_of(part).calls_hooks for part in model.modules())
