"""The job of bench/click.py: DeepFM on 39 fields of ids, written with torch's own layers."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

FIELDS = 39
LAYERS = (128, 64, 32)
LEARNING_RATE = 1e-3


class Clicks(NamedTuple):
    """Ids (n, fields) int64, each field's behind the one before, and clicks (n,) float32."""

    ids: np.ndarray
    clicks: np.ndarray


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of all fields' tables")
    parser.add_argument("--factors", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help="in a pass over the samples")
    parser.add_argument("--epochs", type=int, default=3, help="timed")
    parser.add_argument("--warm-up", type=int, default=1, help="epochs before the timed ones")
    parser.add_argument("--held-out", type=int, default=0, help="samples to compute the AUC of")
    parser.add_argument("--fields-apart", action="store_true", help="a table for each field")
    parser.add_argument("--threads", type=int, required=True)
    return parser


def cardinalities(rows: int) -> np.ndarray:
    """Of each field: a few have most of the ids, as in logs of clicks."""
    weights = np.geomspace(1, 10_000, FIELDS)
    sizes = np.maximum(2, (rows * weights / weights.sum()).astype(np.int64))
    sizes[-1] += rows - sizes.sum()
    return sizes


def made_up(samples: int, rows: int, seed: int) -> Clicks:
    """Ids whose frequency falls as one over their rank, and clicks that depend on them."""
    rng = np.random.default_rng(seed)
    sizes = cardinalities(rows)
    ids = (np.exp(rng.random((samples, FIELDS)) * np.log(sizes + 1)) - 1).astype(np.int64)
    ids = np.minimum(ids, sizes - 1)
    ids += np.concatenate([[0], np.cumsum(sizes)[:-1]])
    effects = np.random.default_rng(0).normal(0, 0.4, 65_521).astype(np.float32)
    logits = effects[ids % 65_521].sum(1) - 1
    clicks = (rng.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return Clicks(ids, clicks)


def of(arguments: argparse.Namespace) -> tuple[Clicks, Clicks]:
    """The training samples and the held-out ones."""
    train = made_up(arguments.batch * arguments.steps, arguments.rows, 1)
    return train, made_up(arguments.held_out, arguments.rows, 2)


class DeepFM(nn.Module):
    """Guo et al. 2017: first order, pairs by factors, and a network on the factors.

    Args:
        rows: of all fields.
        factors: of each id.
        sparse: whether the tables have sparse gradients.
    """

    def __init__(self, rows: int, factors: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(rows, 1, sparse=sparse)
        self.factors = nn.Embedding(rows, factors, sparse=sparse)
        self.deep = network(factors)
        begin([self.first, self.factors])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (n,) of ids (n, fields)."""
        return combined(self.first(ids), self.factors(ids), self.deep)


class DeepFMByField(nn.Module):
    """The same with two tables for each field."""

    def __init__(self, rows: int, factors: int, *, sparse: bool = False) -> None:
        super().__init__()
        sizes = cardinalities(rows).tolist()
        self.first = nn.ModuleList(nn.Embedding(n, 1, sparse=sparse) for n in sizes)
        self.factors = nn.ModuleList(nn.Embedding(n, factors, sparse=sparse) for n in sizes)
        self.deep = network(factors)
        begin([*self.first, *self.factors])
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.register_buffer("starts", torch.from_numpy(starts))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (n,) of ids (n, fields)."""
        own = (ids - self.starts).unbind(1)
        first = torch.stack([t(i) for t, i in zip(self.first, own, strict=True)], 1)
        factors = torch.stack([t(i) for t, i in zip(self.factors, own, strict=True)], 1)
        return combined(first, factors, self.deep)


def network(factors: int) -> nn.Sequential:
    widths = [FIELDS * factors, *LAYERS]
    layers: list[nn.Module] = []
    for before, width in pairwise(widths):
        layers += [nn.Linear(before, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def begin(tables: list[nn.Embedding]) -> None:
    for table in tables:
        nn.init.uniform_(table.weight, -0.01, 0.01)


def combined(first: torch.Tensor, factors: torch.Tensor, deep: nn.Module) -> torch.Tensor:
    pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
    return first.sum((1, 2)) + pairs + deep(factors.flatten(1)).squeeze(1)


def model(arguments: argparse.Namespace, *, sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    kind = DeepFMByField if arguments.fields_apart else DeepFM
    return kind(arguments.rows, arguments.factors, sparse=sparse)


def auc(logits: np.ndarray, clicks: np.ndarray) -> float:
    """The share of pairs of a click and none that the logits order rightly."""
    if not len(clicks):
        return float("nan")
    places = np.empty(len(logits))
    places[np.argsort(logits, kind="stable")] = np.arange(1, len(logits) + 1)
    hits = clicks == 1
    count = int(hits.sum())
    return float((places[hits].sum() - count * (count + 1) / 2) / (count * (len(clicks) - count)))


@torch.no_grad()
def auc_of(model: nn.Module, held_out: Clicks) -> float:
    logits = [model(ids) for ids in torch.from_numpy(held_out.ids).split(4096)]
    return auc(torch.cat(logits).numpy() if logits else np.empty(0), held_out.clicks)
