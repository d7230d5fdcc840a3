"""The model and the images as every peer on plain torch modules has them."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import transfer_job
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


def model(size: int, head_only: bool = False) -> nn.Sequential:
    """VGG16 as torchvision has it up to its last pooling, then Flatten and Dense; random weights.

    All of it is frozen but the last block (or that as well) and the Dense.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels, last_block = 3, 0
    for width, convolutions in transfer_job.BLOCKS:
        last_block = len(layers)
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
            channels = width
        layers.append(nn.MaxPool2d(2))
    features = nn.Sequential(*layers)
    (features if head_only else features[:last_block]).requires_grad_(False)
    head = nn.Linear(channels * (size // 32) ** 2, transfer_job.CLASSES)
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), head=head))


class Photographs(Dataset):
    """Images from 0 to 1, (3, size, size) or, for Keras, (size, size, 3), and their classes."""

    def __init__(self, folder: Path, size: int, channels_last: bool = False) -> None:
        self.paths, self.labels = transfer_job.files(folder)
        self.size, self.channels_last = (size, size), channels_last

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.paths[index]) as image:
            small = image.convert("RGB").resize(self.size, Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(small, np.float32) / 255)
        return (pixels if self.channels_last else pixels.permute(2, 0, 1)), self.labels[index]


def loader(images: Photographs, workers: int = 1, *, pins: bool = False) -> DataLoader:
    """On two CPUs one process decodes while the other one computes: several times as fast."""
    return DataLoader(
        images,
        batch_size=transfer_job.BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
        pin_memory=pins,
    )
