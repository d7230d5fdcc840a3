"""A fit whose Dataset is slower than its model: what bench/starved.py starts."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import flatout

SAMPLES, COLUMNS, BATCH, EPOCHS = 12_000, 64, 128, 5


class Samples(Dataset[Any]):
    """Rows in memory; what is done with each is the kind."""

    def __init__(self) -> None:
        self.x = np.random.default_rng(0).normal(size=(SAMPLES, COLUMNS)).astype(np.float32)
        self.y = np.random.default_rng(1).integers(0, 10, SAMPLES)

    def __len__(self) -> int:
        return SAMPLES


class Arrays(Samples):
    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Waiting(Samples):
    """As for a disk or a network."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0003)
        return self.x[int(index)], int(self.y[index])


class Python(Samples):
    """Holds the interpreter."""

    def __getitem__(self, index: int) -> Any:
        total = 0
        for number in range(2000):
            total += number
        return self.x[int(index)] + (total == 0), int(self.y[index])


class Numpy(Samples):
    """Computes without the interpreter, in part."""

    def __getitem__(self, index: int) -> Any:
        spread = np.sort(np.tile(self.x[int(index)], 200))
        return self.x[int(index)] - spread[0], int(self.y[index])


KINDS = {"arrays": Arrays, "waiting": Waiting, "python": Python, "numpy": Numpy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=list(KINDS), required=True)
    parser.add_argument("--workers", required=True, help="auto, thread or a number")
    arguments = parser.parse_args()
    named = arguments.workers in ("auto", "thread")
    workers = arguments.workers if named else int(arguments.workers)
    recipe = flatout.Recipe(input={"workers": workers}).replace({"compute.precision": "fp32"})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, 512), nn.ReLU(), nn.Linear(512, 10))
    trainer = flatout.Trainer(model, recipe=recipe, allow="exact")
    data = KINDS[arguments.kind]()
    start = time.perf_counter()
    history = trainer.fit(data, batch_size=BATCH, epochs=EPOCHS, progress=False)
    seconds = time.perf_counter() - start
    assert history.recipe is not None
    result = {
        "seconds": seconds,
        "workers": history.recipe.input.workers,
        "said": history.recipe.choices["input.workers"].reason,
        "loss": history.epochs[-1]["loss"],
    }
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
