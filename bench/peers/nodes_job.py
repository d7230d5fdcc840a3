"""The job of bench/parallel.py on two nodes: an MLP of 4 M parameters, until a loss is reached.

SGD with momentum is the cheapest update: the time goes to computing gradients and sending them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import convnet_job
import torch
from torch import nn
from torch.nn import functional

BATCH = 128  # of all ranks together
LEARNING_RATE, MOMENTUM = 0.03, 0.9
# So often is looked whether the loss is reached, on so many of the training images.
EVERY, LOOKED_AT = 10, 1024
MOST_EPOCHS = 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--loss", type=float, required=True, help="of training, to be reached")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    return parser.parse_args()


def model() -> nn.Module:
    torch.manual_seed(0)
    side, hidden, classes = convnet_job.SIDE, 1640, convnet_job.CLASSES
    return nn.Sequential(
        nn.Linear(side * side, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


def load(path: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Training and held-out images, flat, with their labels."""
    return tuple(
        (torch.from_numpy(images).flatten(1), torch.from_numpy(labels))
        for images, labels in convnet_job.load(path)
    )


class UntilLoss:
    """A clock that stands still while the loss is looked at.

    Replicas have the same weights, so all ranks find the same.
    """

    def __init__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: float) -> None:
        self.model, self.x, self.y, self.wanted = model, x[:LOOKED_AT], y[:LOOKED_AT], loss
        self.seconds, self.steps, self.found = 0.0, 0, float("inf")
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    @torch.no_grad()
    def reached(self) -> bool:
        """Call it after each `EVERY` steps."""
        self.seconds += time.perf_counter() - self._since
        self.steps += EVERY
        self.found = functional.cross_entropy(self.model(self.x), self.y).item()
        self.start()
        return self.found <= self.wanted

    def report(self, out: Path, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.found > self.wanted:
            raise SystemExit(f"loss {self.found:.3f} after {self.steps} steps: not {self.wanted}")
        with torch.no_grad():
            right = (self.model(x).argmax(1) == y).float().mean().item()
        result = {
            "epoch_seconds": [self.seconds],
            "steps": 1,
            "accuracy": right,
            "note": f"{self.steps} steps, {self.seconds / self.steps * 1e3:.0f} ms each",
        }
        out.write_text(json.dumps(result))
