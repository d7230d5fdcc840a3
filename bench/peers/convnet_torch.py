"""The ConvNet and its data as every peer on plain torch modules has them."""

from __future__ import annotations

from pathlib import Path

import convnet_job
import torch
from torch import nn
from torch.utils.data import TensorDataset

_CHUNK = 500  # images at a time, where nothing is timed


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding="same"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (convnet_job.SIDE // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, convnet_job.CLASSES),
    )


def load(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out sets: images (n, 1, 28, 28) float32, labels (n,) int64."""
    train, held_out = (
        TensorDataset(torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels))
        for images, labels in convnet_job.load(path)
    )
    return train, held_out


@torch.inference_mode()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Share of right answers in fp32, whatever precision trained the model."""
    images, labels = dataset.tensors
    model.eval()
    answers = torch.cat([model(chunk).argmax(1) for chunk in images.split(_CHUNK)])
    return (answers == labels).float().mean().item()
