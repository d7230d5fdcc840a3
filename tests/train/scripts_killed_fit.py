"""Fits in child processes that are really killed, resumed until done, and compared.

    python scripts_killed_fit.py FOLDER KILLS SEED arrays|loader|dataset|frozen

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

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import data, figures, network, quiet, saving
from train_killed import Slow, digest_of, finished, started

import flatout
from flatout import unfinished
from flatout.data.features.row_log import RECORD
from flatout.recipe import Compute, Input
from flatout.save.checkpoint import Checkpoints
from flatout.train.callbacks import EarlyStopping
from flatout.train.parts.features import features
from flatout.train.parts.features.choice import Choice

EPOCHS = 8
IMAGES = 40


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
    if kind == "frozen":
        frozen_fit(run, every, pipe)
        return
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
    write(run, model, optimizer, history)


def write(run: Path, model, optimizer, history) -> None:
    result = {"digest": digest_of(model, optimizer), "epochs": figures(history)}
    (run / "result.json").write_text(json.dumps(result))


def draw_images(folder: Path) -> None:
    for number in range(IMAGES):
        path = folder / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12, 3), np.uint8)
        Image.fromarray(pixels).save(path)


def frozen_fit(run: Path, every: int | None, pipe: int) -> None:
    """The same of a model of which first one layer trains, then two, then all."""
    os.environ["FLATOUT_CACHE"] = str(run.with_suffix(".cache"))
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 2),
    )
    flatout.freeze(model, until="3")
    optimizer = torch.optim.SGD(model[5].parameters(), lr=0.05, momentum=0.9)
    train, val = (flatout.data.images(run.parent / "images") for _ in range(2))
    recipe = saving(every).model_copy(
        update={
            "input": Input(features="disk"),
            "compute": Compute(precision="fp32", memory_format="contiguous", capture="off"),
        }
    )
    features.choose = smallest
    job = flatout.Trainer(
        model, optimizer=optimizer, metrics=["accuracy"], recipe=recipe, run=run, say=quiet
    )
    thaws = [flatout.Unfreeze(4, "2", lr=0.02), flatout.Unfreeze(6, "0", lr=0.01)]
    history = job.fit(
        train.augment(flip="horizontal").shuffle(seed=1).batch(8),
        epochs=EPOCHS,
        validation_data=val.batch(8),
        callbacks=[*thaws, Slow(pipe)],
        resume=True,
        progress=False,
    )
    write(run, model, optimizer, history)


def smallest(options, samples, epochs, plain_s):
    """Of the cuts the smallest, however short the run."""
    best = min(options, key=lambda one: one.bytes)
    return Choice(best, "", plain_s, plain_s / 10, 2, best.bytes * samples * best.variants)


def rows_kept(run: Path) -> dict[str, int]:
    """Of each cut, in each precision, so many rows."""
    logs = run.with_suffix(".cache").glob("features/*/filled.log")
    return {log.parent.name: log.stat().st_size // RECORD.itemsize for log in logs}


def main(folder: Path, kills: int, seed: int, kind: str) -> dict[str, int]:
    draw_images(folder)
    draw = random.Random(seed)
    # What a first step imports is here before the forks.
    flatout.Trainer(network(), say=quiet).fit(data(), progress=False)
    whole, run = folder / "whole", folder / "run"
    began = time.monotonic()
    assert finished(*started(fit, whole, kind, 1, None)) == 0
    # On a busy machine a fit takes longer, so it gets more time until it is killed.
    longest_s = max(0.25, (time.monotonic() - began) / 4)
    last = progress = within = done = 0
    kept: dict[str, int] = {}
    while done < kills:
        pid, reading = started(fit, run, kind, 1 if last == 0 else 50 + done, 3)
        os.read(reading, 1)
        time.sleep(draw.uniform(0, longest_s))
        os.kill(pid, signal.SIGKILL)
        if finished(pid, reading) == 0:
            # It was through before the kill: the result is compared, and another one begins.
            compare(whole, run)
            run, last, kept = folder / f"run-{done}", 0, {}
            continue
        done += 1
        was, kept = kept, rows_kept(run)
        assert all(kept[name] >= rows for name, rows in was.items()), (was, kept)
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
    # None is kept twice: what was there was found.
    assert all(rows <= 2 * IMAGES for rows in rows_kept(run).values())
    return {"kills": done, "progress": progress, "within": within, "cuts": len(rows_kept(run))}


def compare(whole: Path, run: Path) -> None:
    ours, theirs = (json.loads((f / "result.json").read_text()) for f in (run, whole))
    assert ours == theirs, f"{run} differs from the undisturbed fit"


if __name__ == "__main__":
    torch.set_num_threads(1)  # no thread of torch's may be left behind by a fork
    target, count, number, name = sys.argv[1:]
    print(json.dumps(main(Path(target), int(count), int(number), name)))
