"""A fit beside a plain loop, or a fit that measures: what bench/overhead.py starts."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatout

ROWS, COLUMNS, BATCH = 80_000, 25, 1024


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(COLUMNS, 32), nn.ReLU(), nn.Linear(32, 2))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(576, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), *(Block(32) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, (COLUMNS,)),
    "convnet": (convnet, (1, 28, 28)),
    "resnet": (resnet, (3, 32, 32)),
}


def overhead(rounds: int) -> dict[str, Any]:
    """Seconds of a fit less those of the loop behind it, `rounds` times."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, COLUMNS), torch.randint(0, 2, (ROWS,))

    def loop() -> float:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters())
        began = time.perf_counter()
        for index in torch.randperm(ROWS).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        return time.perf_counter() - began

    def fit() -> float:
        trainer = flatout.Trainer(mlp(), loss="cross_entropy", say=lambda line: None)
        began = time.perf_counter()
        trainer.fit(x, y, batch_size=BATCH, progress=False)
        return time.perf_counter() - began

    loop(), fit()
    return {"differences": [-loop() + fit() for _ in range(rounds)]}


def share(name: str, samples: int, batch_size: int, epochs: int) -> dict[str, Any]:
    """Seconds of a fit, and those that it is longer for measuring settings."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    x, y = torch.randn(samples, *shape), torch.randint(0, 2, (samples,))
    said: list[str] = []
    trainer = flatout.Trainer(make(), loss="cross_entropy", say=said.append)
    began = time.perf_counter()
    history = trainer.fit(x, y, batch_size=batch_size, epochs=epochs, progress=False)
    fit_s = time.perf_counter() - began
    tuning = history.tuning or {"before_first_step_s": 0.0, "lost_s": 0.0}
    measuring_s = tuning["before_first_step_s"] + tuning["lost_s"]
    line = next(iter(said), "the run ended before anything was measured")
    return {"fit_s": fit_s, "measuring_s": measuring_s, "said": line}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overhead", type=int, metavar="ROUNDS")
    parser.add_argument("--share", nargs=4, metavar=("MODEL", "SAMPLES", "BATCH", "EPOCHS"))
    arguments = parser.parse_args()
    if arguments.share is None:
        found = overhead(arguments.overhead)
    else:
        name, *numbers = arguments.share
        found = share(name, *map(int, numbers))
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
