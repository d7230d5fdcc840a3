"""Small models with a `body` that can be frozen and a `head`; inputs have twelve numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CLASSES, WIDTH = 3, 12


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.body(x / 8))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Unflatten(1, (1, 3, 4))
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(48, CLASSES))

    def forward(self, x):
        return self.head(self.body(self.cut(x / 8)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Unflatten(1, (4, 3))
        self.body = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.body(self.cut(x / 8))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Embedding(12, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.block = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        ids = x.long()
        pad = ids == 0
        h = self.block(self.body(ids), src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).to(h.dtype)
        return self.head((h * keep).sum(1) / keep.sum(1))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.other = nn.Linear(6, 8)
        self.kind, self.size = nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, left, right):
        h = (self.body(left / 8) + self.other(right / 8)).tanh()
        return {"kind": self.kind(h), "size": self.size(h)}


TORCH = {"mlp": Mlp, "conv": Conv, "lstm": Lstm, "attention": Attention, "two": Two}


def torch_model(case: Any) -> nn.Module:
    """Return the model of a case, for models that are not Keras models."""
    torch.manual_seed(0)
    model = TORCH[case.model]()
    if case.frozen == "body":
        model.body.requires_grad_(False)
    return model
