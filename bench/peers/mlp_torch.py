"""The MLP as every peer on plain torch modules has it."""

from __future__ import annotations

import mlp_job
import torch
from torch import nn


def tensors(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = mlp_job.data(samples)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(mlp_job.FEATURES, mlp_job.HIDDEN),
        nn.ReLU(),
        nn.Linear(mlp_job.HIDDEN, mlp_job.CLASSES),
    )


@torch.no_grad()
def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    return (model(inputs).argmax(1) == labels).float().mean().item()
