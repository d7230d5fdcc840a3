"""The jobs of bench/input.py: from files to shuffled batches, pass after pass.

A peer opens its files, and then gives one pass over them after the other. The first pass is timed
with the opening; the second one is checked row by row; the median of the later ones counts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from input_check import Wrong, check_images, check_rows
from stamps import Stamps

# Files of each kind of data; a slow peer reads some of them, and its rows per second count.
PARTS = 8
# Columns of the click-through rows: numbers, and hashed categories.
NUMBERS, HASHED = 13, 26
CLASSES = ("china", "flower")
HEIGHT, WIDTH = 496, 512
PIXELS = 224  # of the images in a batch
BATCH = {"libsvm": 4096, "tfrecord": 4096, "criteo": 4096, "jpeg": 32, "memory": 512}
PASSES = 3  # timed, or more

# (labels, *inputs), as arrays or tensors.
Batch: TypeAlias = tuple[Any, ...]
Pass: TypeAlias = Callable[[int], Iterable[Batch]]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="made by bench/input_data.py")
    parser.add_argument("--kind", choices=BATCH, required=True)
    parser.add_argument("--form", default="", help="which of several ways to do it")
    parser.add_argument("--cpus", type=_numbers, required=True, help="such as 0,1")
    parser.add_argument("--parts", type=int, default=PARTS, help="read so many of the files")
    parser.add_argument("--seconds", type=float, default=2.0, help="time at least this long")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def start() -> argparse.Namespace:
    """Read the arguments and stay on the CPUs given: before any library counts them."""
    arguments = parser().parse_args()
    os.sched_setaffinity(0, arguments.cpus)
    arguments.threads = len(arguments.cpus)
    return arguments


def shuffled(arguments: argparse.Namespace, epoch: int, *columns: np.ndarray) -> Iterator[Batch]:
    """Batches of columns in memory, in an order of the epoch's own."""
    order = np.random.default_rng(epoch).permutation(len(columns[0]))
    size = BATCH[arguments.kind]
    for begin in range(0, len(order), size):
        rows = order[begin : begin + size]
        yield tuple(column.take(rows, axis=0) for column in columns)


def known_rows(arguments: argparse.Namespace) -> int:
    """Rows of the files that the peer reads."""
    if arguments.kind == "jpeg":
        return len(image_paths(arguments)[0])
    return sum(len(np.load(path, mmap_mode="r")) for path in _keys(arguments))


def files(arguments: argparse.Namespace) -> list[str]:
    return [str(path) for path in sorted(folder(arguments).glob("part-*"))[: arguments.parts]]


def folder(arguments: argparse.Namespace) -> Path:
    return arguments.data / arguments.kind


def memory(arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (rows, 28, 28) and labels int64."""
    at = folder(arguments)
    return np.load(at / "images.npy"), np.load(at / "labels.npy")


def image_paths(arguments: argparse.Namespace) -> tuple[list[str], np.ndarray]:
    """The JPEG files and their classes."""
    found = [sorted((folder(arguments) / name).glob("*.jpg")) for name in CLASSES]
    labels = np.repeat(np.arange(len(CLASSES)), list(map(len, found)))
    return [str(path) for paths in found for path in paths], labels


def measure(arguments: argparse.Namespace, open_files: Callable[[], Pass]) -> None:
    """Time a peer, check what it gives, and write the report."""
    begin = time.perf_counter()
    one_pass = open_files()
    rows = _rows(one_pass(0))
    first_seconds = time.perf_counter() - begin
    _check(arguments, one_pass(1))
    stamps = Stamps()
    stamps.mark()
    while len(stamps.readings) <= PASSES or _timed(stamps) < arguments.seconds:
        timed = _rows(one_pass(1 + len(stamps.readings)))
        if timed != rows:
            raise Wrong(f"expected {rows:,} rows in each pass, found {timed:,}")
        stamps.mark()
    result = {
        "epoch_seconds": stamps.epoch_seconds(),
        "first_seconds": first_seconds,
        "steps": rows / BATCH[arguments.kind],
        "note": "",
    }
    arguments.out.write_text(json.dumps(result))


def _timed(stamps: Stamps) -> float:
    return stamps.readings[-1] - stamps.readings[0]


def _rows(batches: Iterable[Batch]) -> int:
    return sum(int(batch[0].shape[0]) for batch in batches)


def _check(arguments: argparse.Namespace, batches: Iterable[Batch]) -> None:
    at = folder(arguments)
    if arguments.kind == "jpeg":
        check_images(batches, at.with_suffix(".npz"), PIXELS)
        return
    check_rows(batches, np.concatenate([np.load(path) for path in _keys(arguments)]))


def _keys(arguments: argparse.Namespace) -> list[Path]:
    return sorted(folder(arguments).glob("keys-*.npy"))[: arguments.parts]
