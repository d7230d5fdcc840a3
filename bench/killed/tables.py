"""Kills while a cache on the disk is being filled, and inside `flatout data convert`."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
from pathlib import Path

import numpy as np

import flatout
from flatout.cli.main import main as command
from flatout.data.batches.batch import named_tensors
from killed.processes import Tell
from killed.series import forked

ROWS = 3000


def write_table(folder: Path) -> None:
    """A CSV file of numbers and words."""
    draw = random.Random(1)
    words = [f"word {number}" for number in range(40)]
    rows = [
        f"{draw.random():.6f},{draw.randrange(1000)},{draw.choice(words)},{draw.randrange(5)}"
        for _ in range(ROWS)
    ]
    (folder / "table.csv").write_text("\n".join(["a,b,c,y", *rows]) + "\n")


def table(folder: Path) -> flatout.data.Pipeline:
    return flatout.data.csv(str(folder.parent / "table.csv"), target="y")


def digest(made: flatout.data.Pipeline, epochs: int) -> str:
    found = hashlib.sha256()
    for epoch in range(epochs):
        for batch in made.batches(epoch):
            for name, tensor in named_tensors("", tuple(batch[:4])):
                found.update(name.encode() + np.ascontiguousarray(tensor.numpy()).tobytes())
    return found.hexdigest()


class Scaled:
    """A function of one row. One with a lock has no name, so no one else finds its cache."""

    def __init__(self, nameless: bool) -> None:
        if nameless:
            self.lock = threading.Lock()

    def __call__(self, inputs: dict, target: object) -> tuple[dict, object]:
        return {name: value * 2 for name, value in inputs.items()}, target


def fill(tell: Tell, folder: Path, variation: str) -> str:
    """Two epochs through a cache that is filled in the first."""
    made = table(folder)
    if variation != "rows":
        made = made.map(Scaled(variation == "nameless"))
    return digest(made.shuffle(seed=1).batch(32).cache("disk"), 2)


def convert(tell: Tell, folder: Path, variation: str) -> str:
    """By the command; where it is to overwrite, what was there before was made otherwise."""
    kind = variation.split()[0]
    target = folder / "out" / f"table.{kind}"
    first = ["data", "convert", str(folder.parent / "table.csv"), str(target), "--target", "y"]
    shards = [] if kind == "rows" else ["--shards", "6"]
    if "overwriting" in variation and not (folder / "before").exists():
        _call([*first, "--shuffle", "2", *shards])
        (folder / "before").touch()
    over = ["--overwrite"] if "overwriting" in variation else []
    _call([*first, "--shuffle", "1", *shards, *over])
    schema = str(folder / "out" / f"_table.{kind}.toml")
    if kind == "rows":
        opened = flatout.data.rows(str(target))
    else:
        read = getattr(flatout.data, kind)
        opened = read(str(folder / "out" / f"table-*.{kind}"), schema=schema)
    names = sorted(os.listdir(folder / "out"))
    inside = sorted(os.listdir(target)) if kind == "rows" else []
    return f"{names} {inside} {digest(opened.batch(50), 1)}"


def _call(words: list[str]) -> None:
    sys.argv = ["flatout", *words]
    try:
        command()
    except SystemExit as ended:
        if ended.code:
            raise


CACHES = forked(
    "caches",
    "a process that fills a cache on the disk",
    150,
    ["rows", "mapped", "nameless"],
    fill,
    None,
    write_table,
    each=6,
)
CONVERTS = forked(
    "converts",
    "flatout data convert",
    150,
    ["tfrecord", "parquet", "rows", "tfrecord overwriting", "rows overwriting"],
    convert,
    None,
    write_table,
    each=6,
)
