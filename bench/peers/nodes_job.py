"""The job of bench/parallel.py on two nodes: an MLP of 4 M parameters, to a held-out loss.

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
EVERY = 20  # steps between looks at the held-out loss
MOST_EPOCHS = 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--loss", type=float, required=True, help="held-out, to be reached")
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
    """A clock that stands still while the held-out loss is looked at.

    Ranks have the same weights then, so all find the same. The time is that of the step between
    two looks at which a straight line reaches the loss.
    """

    def __init__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: float) -> None:
        self.model, self.x, self.y, self.wanted = model, x, y, loss
        self.seconds, self.steps, self.found = 0.0, 0.0, float("inf")
        self._since = time.perf_counter()

    def start(self) -> None:
        self._since = time.perf_counter()

    @torch.no_grad()
    def reached(self) -> bool:
        """Call it after each `EVERY` steps, until it says yes."""
        spent, before = time.perf_counter() - self._since, self.found
        outputs = self.model(self.x)
        self.found = functional.cross_entropy(outputs, self.y).item()
        self.right = (outputs.argmax(1) == self.y).float().mean().item()
        done = self.found <= self.wanted
        share = (before - self.wanted) / (before - self.found) if done and self.steps else 1.0
        self.seconds += share * spent
        self.steps += share * EVERY
        self.start()
        return done

    def report(self, out: Path) -> None:
        if self.found > self.wanted:
            raise SystemExit(
                f"loss {self.found:.3f} after {self.steps:.0f} steps: not {self.wanted}"
            )
        result = {
            "epoch_seconds": [self.seconds],
            "steps": 1,
            "accuracy": self.right,
            "note": f"{self.steps:.0f} steps, {self.seconds / self.steps * 1e3:.0f} ms each",
        }
        out.write_text(json.dumps(result))
