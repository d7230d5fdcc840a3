"""Families of models that settings were not tuned on: a model, its data and its loss by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES, WORDS = 10, 1000


@dataclass(frozen=True)
class Family:
    """What is trained.

    Args:
        model: makes it.
        inputs: makes those of so many samples.
        targets: made of the inputs, so that there is something to learn.
        loss: of outputs and targets.
        batch: samples of a step.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    targets: Callable[[Any], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: int


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES)
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, CLASSES),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != channels:
            convolution = nn.Conv2d(before, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def _separable(before: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False),
        nn.BatchNorm2d(before), nn.ReLU6(),
        nn.Conv2d(before, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU6(),
    )  # fmt: skip


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(),
        _separable(32, 64, 1), _separable(64, 128, 2), _separable(128, 128, 1),
        _separable(128, 256, 2), _separable(256, 256, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, CLASSES),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels down and up again, with the skips between them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.level(3, 32), self.level(32, 64)])
        self.bottom = self.level(64, 128)
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(128, 64, 2, 2)]
        )
        self.up = nn.ModuleList([self.level(64, 32), self.level(128, 64)])
        self.head = nn.Conv2d(32, 1, 1)

    @staticmethod
    def level(before: int, channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(before, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for grow, level, skip in zip(
            reversed(self.grow), reversed(self.up), reversed(kept), strict=True
        ):
            x = level(torch.cat([skip, grow(x)], 1))
        return self.head(x)


class Transformer(nn.Module):
    """Blocks of attention; over patches of an image, or causal over words."""

    def __init__(self, words: int, length: int, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.causal = words > 0
        self.embed = nn.Embedding(words, width) if words else nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, words or CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = (x if self.causal else x.flatten(2).mT) + self.place
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=self.causal)
        return self.head(x) if self.causal else self.head(x.mean(1))


class Lstm(nn.Module):
    """Over a sequence of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TextCnn(nn.Module):
    """Convolutions of three widths over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 128)
        self.convolutions = nn.ModuleList(nn.Conv1d(128, 128, width) for width in (3, 4, 5))
        self.head = nn.Linear(384, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).mT
        return self.head(torch.cat([F.relu(c(x)).amax(2) for c in self.convolutions], 1))


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.GELU(), nn.Conv2d(32, 64, 3, 2, 1), nn.GELU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(32, 3, 4, 2, 1),
    )  # fmt: skip


class Tables(nn.Module):
    """Numbers beside columns of ids, each with its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(20_000, 16) for _ in range(8))
        self.body = nn.Sequential(
            nn.Linear(13 + 128, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = [column(ids[:, i]) for i, column in enumerate(self.columns)]
        return self.body(torch.cat([numbers, *rows], 1)).squeeze(1)


class Graph(nn.Module):
    """Messages along edges: gathered from the nodes, added up at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64)])
        self.updates = nn.ModuleList([nn.Linear(96, 64), nn.Linear(128, 64)])
        self.head = nn.Linear(64, CLASSES)

    def forward(
        self, nodes: torch.Tensor, sources: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        graphs, count, _ = nodes.shape
        first = count * torch.arange(graphs)[:, None]
        source, end = (sources + first).flatten(), (ends + first).flatten()
        h = nodes.flatten(0, 1)
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = F.relu(message(h))[source]
            received = torch.zeros(len(h), sent.shape[1], dtype=sent.dtype).index_add(0, end, sent)
            h = F.relu(update(torch.cat([h, received.to(h.dtype)], 1)))
        return self.head(h.unflatten(0, (graphs, count)).mean(1))


class Mixer(nn.Module):
    """MLPs over patches and over channels in turn."""

    def __init__(self, patches: int = 64, width: int = 128, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.over_patches = nn.ModuleList(self.mlp(patches, 128) for _ in range(depth))
        self.over_channels = nn.ModuleList(self.mlp(width, 256) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    @staticmethod
    def mlp(width: int, hidden: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).mT
        for number, (patches, channels) in enumerate(
            zip(self.over_patches, self.over_channels, strict=True)
        ):
            x = x + patches(self.norms[2 * number](x).mT).mT
            x = x + channels(self.norms[2 * number + 1](x))
        return self.head(x.mean(1))


def _vectors(count: int) -> torch.Tensor:
    return torch.randn(count, 784)


def _images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32)


def _words(count: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (count, 64))


def _table(count: int) -> dict[str, torch.Tensor]:
    return {"numbers": torch.randn(count, 13), "ids": torch.randint(0, 20_000, (count, 8))}


def _graphs(count: int) -> dict[str, torch.Tensor]:
    edges = torch.randint(0, 64, (2, count, 256))
    return {"nodes": torch.randn(count, 64, 32), "sources": edges[0], "ends": edges[1]}


def _class(x: Any) -> torch.Tensor:
    values = x["nodes"] if isinstance(x, dict) else x
    means = values.float().flatten(1)[:, :8].mean(1)
    return torch.bucketize(means, means.quantile(torch.linspace(0.1, 0.9, CLASSES - 1)))


def _click(x: Any) -> torch.Tensor:
    return (x["numbers"].sum(1) + x["ids"][:, 0] / 20_000 > 0.5).float()


def _mask(x: torch.Tensor) -> torch.Tensor:
    return (x.mean(1, keepdim=True) > 0).float()


def _of_words(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), words[:, 1:].flatten())


FAMILIES = {
    "mlp": Family(mlp, _vectors, _class, F.cross_entropy, 256),
    "convnet": Family(convnet, _images, _class, F.cross_entropy, 128),
    "resnet": Family(resnet, _images, _class, F.cross_entropy, 32),
    "depthwise": Family(depthwise, _images, _class, F.cross_entropy, 32),
    "unet": Family(UNet, _images, _mask, F.binary_cross_entropy_with_logits, 16),
    "vit": Family(lambda: Transformer(0, 64), _images, _class, F.cross_entropy, 32),
    "gpt": Family(lambda: Transformer(WORDS, 64), _words, lambda x: x, _of_words, 32),
    "lstm": Family(Lstm, lambda n: torch.randn(n, 48, 32), _class, F.cross_entropy, 64),
    "textcnn": Family(TextCnn, _words, _class, F.cross_entropy, 64),
    "autoencoder": Family(autoencoder, _images, lambda x: x, F.mse_loss, 64),
    "tables": Family(Tables, _table, _click, F.binary_cross_entropy_with_logits, 1024),
    "graph": Family(Graph, _graphs, _class, F.cross_entropy, 64),
    "mixer": Family(Mixer, _images, _class, F.cross_entropy, 32),
}
