"""Kills of a training process alone."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.save.checkpoint import Checkpoints
from flatout.save.model_file import load_model
from killed.processes import Lost, Tell
from killed.series import forked

EPOCHS, EVERY = 4, 3


class Steps(flatout.Callback):
    """Tells each step; a little time in each leaves more of it to be killed in."""

    every = 1

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def on_step(self, state: Any) -> None:
        self._tell(f"step {state.step}")
        time.sleep(0.002)


def trained(folder: Path | None, asynchronous: bool, tell: Tell) -> flatout.Trainer:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(240, 20, generator=draw)
    y = torch.randint(0, 5, (240,), generator=draw)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 5)
    )
    recipe = flatout.Recipe().replace({"save.every": EVERY, "save.asynchronous": asynchronous})
    trainer = flatout.Trainer(
        model,
        lr=0.01,
        allow="exact",
        metrics=["accuracy"],
        recipe=recipe,
        run=None if folder is None else folder / "run",
        say=lambda line: None,
    )
    trainer.fit(
        (x, y),
        batch_size=8,
        epochs=EPOCHS,
        callbacks=[Steps(tell)],
        progress=False,
        resume=folder is not None,
    )
    return trainer


def work(tell: Tell, folder: Path, variation: str) -> str:
    trainer = trained(folder, variation == "asynchronous", tell)
    trainer.save(folder / "final.safetensors")
    digest = hashlib.sha256()
    for name, weight in sorted(load_model(folder / "final.safetensors").items()):
        digest.update(name.encode() + weight.numpy().tobytes())
    return digest.hexdigest()


def look(folder: Path, variation: str, told: Sequence[str]) -> None:
    """Of two checkpoints that were due at least the first is there, and all load."""
    steps = max([0, *(int(line.split()[1]) for line in told if line.startswith("step "))])
    place = folder / "run" / "checkpoints"
    checkpoints = Checkpoints(place)
    names = os.listdir(place) if place.exists() else []
    newest = max([0, *(checkpoints.load(name).step for name in names)])
    if newest < steps - 2 * EVERY:
        raise Lost(f"step {steps} was made, and the newest of {names} is of step {newest}")


def warm(folder: Path) -> None:
    """Import here what a fit imports, so that forked ones need not."""
    os.environ["FLATOUT_CACHE"] = str(folder / "cache")
    trained(None, False, lambda line: None)


FITS = forked(
    "fits",
    "a training process alone",
    150,
    ["asynchronous", "synchronous"],
    work,
    look,
    warm,
)
