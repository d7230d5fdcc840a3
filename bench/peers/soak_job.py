"""Train many short epochs on one kind of input, with validation and a checkpoint after each.

    python bench/peers/soak_job.py KIND SECONDS FOLDER

After each epoch each rank writes a line of JSON into FOLDER: the resources that its process and all
child processes hold.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.world import place

SAMPLES, BATCH = 512, 64
# The fewest epochs for a verdict.
FEWEST = 8
KINDS = ("loader", "dataset", "pipeline", "keras")


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return torch.full((32,), float(number % 7)), number % 3


def data_of(kind: str) -> Any:
    """Return data to train on or to validate on, with one worker process if the kind allows it."""
    if kind == "loader":
        order = torch.Generator().manual_seed(1)
        return DataLoader(Samples(), BATCH, shuffle=True, num_workers=1, generator=order)
    if kind == "dataset":
        return flatout.data.dataset(Samples(), batch_size=BATCH, workers=1)
    if kind == "pipeline":
        rows = flatout.data.torch_dataset(Samples()).shuffle(seed=1)
        return rows.batch(BATCH).options(processes=1)
    x = torch.arange(SAMPLES * 32, dtype=torch.float32).reshape(SAMPLES, 32) % 7
    return flatout.data.arrays(x, torch.arange(SAMPLES) % 3).shuffle(seed=1).batch(BATCH)


def held() -> dict[str, int]:
    """Return the resources that this process and all its child processes hold."""
    own = psutil.Process()
    below = [p for p in own.children(recursive=True) if "resource_tracker" not in _command(p)]
    shared: set[str] = set()
    memory = threads = 0
    for process in [own, *below]:
        try:
            memory += process.memory_full_info().uss
            threads += process.num_threads()
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        except (psutil.Error, OSError):
            continue  # the process has just ended
        shared |= {line.split(maxsplit=5)[-1] for line in maps if "/dev/shm/" in line}
    return {
        "processes": len(below),
        "uss": memory,
        "descriptors": own.num_fds(),
        "threads": threads,
        "shm": len(shared),
    }


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Watch(flatout.Callback):
    """Write the held resources after each epoch, and end the fit when the time is over."""

    def __init__(self, seconds: float, file: Path) -> None:
        self._until, self._file = time.monotonic() + seconds, file

    def on_epoch_end(self, state: Any) -> None:
        state.trainer.save_checkpoint()
        with self._file.open("a") as out:
            out.write(json.dumps(held()) + "\n")
        if time.monotonic() > self._until and state.epoch >= FEWEST:
            state.stop("the time is over")


def trainer_of(kind: str, run: Path) -> flatout.Trainer:
    """Return a Trainer of a small model; of a Keras model for the kind `keras`."""
    if kind != "keras":
        return flatout.Trainer(nn.Linear(32, 3), optimizer="sgd", run=run)
    import keras

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    return flatout.Trainer(model, run=run)


def main() -> None:
    kind, seconds, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    watch = Watch(seconds, folder / f"rank{place().rank}.jsonl")
    trainer_of(kind, folder / "run").fit(
        data_of(kind),
        epochs=100_000,
        validation_data=data_of(kind),
        callbacks=[watch],
        progress=False,
    )


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "torch")
    main()
