"""Fits in child processes that are really killed, resumed until done, and compared.

    python scripts_killed_fit.py FOLDER KILLS SEED arrays|loader|dataset

One process imports torch and forks the fits, so that a kill costs milliseconds and not seconds.
Prints one JSON object; every failed expectation is an exception.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import data, figures, network, quiet, saving
from train_killed import Slow, digest_of, finished, started

import flatout
from flatout import unfinished
from flatout.save.checkpoint import Checkpoints
from flatout.train.callbacks import EarlyStopping

EPOCHS = 8


def source(kind: str):
    x, y = data()
    if kind == "arrays":
        return {"x": (x, y), "batch_size": 8}
    if kind == "loader":
        return {"x": DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)}
    return {"x": TensorDataset(x, y), "batch_size": 8}


def fit(run: Path, kind: str, seed: int, every: int | None, pipe: int) -> None:
    """Train to the end and write down what came out."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    job = flatout.Trainer(
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        metrics=["accuracy"],
        recipe=saving(every),
        allow="exact",
        run=run,
        say=quiet,
    )
    history = job.fit(
        **source(kind),
        epochs=EPOCHS,
        validation_data=data(seed=1),
        callbacks=[EarlyStopping("val_loss", patience=EPOCHS), Slow(pipe)],
        resume=True,
        progress=False,
    )
    result = {"digest": digest_of(model, optimizer), "epochs": figures(history)}
    (run / "result.json").write_text(json.dumps(result))


def main(folder: Path, kills: int, seed: int, kind: str) -> dict[str, int]:
    draw = random.Random(seed)
    # What a first step imports is here before the forks.
    flatout.Trainer(network(), say=quiet).fit(data(), progress=False)
    whole, run = folder / "whole", folder / "run"
    assert finished(*started(fit, whole, kind, 1, None)) == 0
    last = progress = within = done = 0
    while done < kills:
        pid, reading = started(fit, run, kind, 1 if last == 0 else 50 + done, 3)
        os.read(reading, 1)
        time.sleep(draw.uniform(0, 0.25))
        os.kill(pid, signal.SIGKILL)
        if finished(pid, reading) == 0:
            # It was through before the kill: the result is compared, and another one begins.
            compare(whole, run)
            run, last = folder / f"run-{done}", 0
            continue
        done += 1
        checkpoints = run / "checkpoints"
        within += any(map(unfinished.is_unfinished, os.listdir(checkpoints)))
        store = Checkpoints(checkpoints)
        name = store.latest()
        assert (name is None) == (last == 0) or last == 0, "a whole checkpoint was lost"
        if name is not None:
            loaded = store.load(name)
            assert loaded.step >= last, (loaded.step, last)
            progress += loaded.step > last
            last = loaded.step
    assert finished(*started(fit, run, kind, 1 if last == 0 else 50 + done, 3)) == 0
    compare(whole, run)
    return {"kills": done, "progress": progress, "within": within}


def compare(whole: Path, run: Path) -> None:
    ours, theirs = (json.loads((f / "result.json").read_text()) for f in (run, whole))
    assert ours == theirs, f"{run} differs from the undisturbed fit"


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread of torch's may be left behind by a fork
    target, count, number, name = sys.argv[1:]
    print(json.dumps(main(Path(target), int(count), int(number), name)))
