"""The same model from the same seed for the peers of ddp_job.py."""

from __future__ import annotations

import ddp_job
import torch
from torch import nn


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(ddp_job.FEATURES, ddp_job.HIDDEN),
        nn.ReLU(),
        nn.Linear(ddp_job.HIDDEN, ddp_job.HIDDEN),
        nn.ReLU(),
        nn.Linear(ddp_job.HIDDEN, ddp_job.CLASSES),
    )


def tensors(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = ddp_job.data(samples)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


@torch.no_grad()
def accuracy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    return float((model(inputs).argmax(1) == labels).float().mean())
