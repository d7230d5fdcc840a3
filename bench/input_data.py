"""The files that bench/input.py reads: the same on every machine.

Each kind of data is a folder with files in `PARTS` parts, and beside each part a `keys-*.npy`: the
keys of its rows in order, by which peers are checked.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from restarts import PEERS, Peer, run_once

sys.path.append(str(PEERS))
from input_check import row_keys
from input_job import CLASSES, HASHED, HEIGHT, NUMBERS, PARTS, WIDTH

MAX_ID = 1_000_000
# Fields of Criteo rows that are empty, as about a tenth of Criteo's own are.
EMPTY = 0.1
QUALITY = 90


def make(kind: str, folder: Path, count: int) -> None:
    """Make the files of a kind with `count` rows or images.

    Raises:
        PeerFailed: the TFRecord files could not be written.
    """
    folder.mkdir()
    if kind == "jpeg":
        make_jpeg(folder, count)
    elif kind == "memory":
        make_memory(folder, count)
    else:
        makers = {"libsvm": make_libsvm, "tfrecord": make_tfrecord, "criteo": make_criteo}
        ends = [count * (part + 1) // PARTS for part in range(PARTS)]
        makers[kind](folder, np.diff(ends, prepend=0).tolist())


def save_keys(folder: Path, part: int, *columns: np.ndarray) -> None:
    np.save(folder / f"keys-{part}.npy", row_keys(*columns))


# -- rows ----------------------------------------------------------------------------------------


class Clicks(NamedTuple):
    """Rows of a click-through model, as the LibSVM and TFRecord files hold them.

    Attributes:
        labels: int64 of shape (rows,), 0 or 1.
        ids: int64 of shape (rows, 39), ascending: 1 to 13, and then one of each field's own range.
        values: float32 of shape (rows, 39): 13 numbers, and then ones.
        numbers: the 13 numbers as float64, each the nearest to its 6 digits.
    """

    labels: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    numbers: np.ndarray


def clicks(rows: int, seed: int) -> Clicks:
    random = np.random.default_rng(seed)
    span = (MAX_ID - NUMBERS) // HASHED
    ids = np.empty((rows, NUMBERS + HASHED), np.int64)
    ids[:, :NUMBERS] = np.arange(1, NUMBERS + 1)
    ids[:, NUMBERS:] = NUMBERS + 1 + span * np.arange(HASHED)
    ids[:, NUMBERS:] += random.integers(0, span, (rows, HASHED))
    digits = random.integers(100_000, 1_000_000, (rows, NUMBERS))
    numbers = digits / 10.0 ** random.integers(2, 7, (rows, NUMBERS))
    values = np.ones(ids.shape, np.float32)
    values[:, :NUMBERS] = numbers
    return Clicks((random.random(rows) < 0.25).astype(np.int64), ids, values, numbers)


def make_libsvm(folder: Path, rows: list[int]) -> None:
    """`label id:value ... id:1`, one line a row."""
    numbers = " ".join(f"{column + 1}:%.6g" for column in range(NUMBERS))
    line = f"%d {numbers} {' '.join(['%d:1'] * HASHED)}\n"
    for part, count in enumerate(rows):
        made = clicks(count, part)
        columns = [made.labels, *made.numbers.T, *made.ids[:, NUMBERS:].T]
        lines = zip(*(column.tolist() for column in columns), strict=True)
        (folder / f"part-{part}.svm").write_text("".join(map(line.__mod__, lines)))
        save_keys(folder, part, made.labels, made.ids, made.values)


def make_tfrecord(folder: Path, rows: list[int]) -> None:
    """Examples of label, ids and values."""
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as beside:
        for part, count in enumerate(rows):
            made = clicks(count, part)
            np.savez(Path(beside, f"part-{part}.npz"), **made._asdict())
            save_keys(folder, part, made.labels, made.ids, made.values)
        arguments = ("--rows", beside, "--to", str(folder))
        run_once(Peer("files", "input_tfrecord_files.py", arguments))


def make_criteo(folder: Path, rows: list[int]) -> None:
    """Label, 13 integers and 26 hexadecimal numbers between tabs; what is empty counts as 0."""
    for part, count in enumerate(rows):
        random = np.random.default_rng(part)
        labels = (random.random(count) < 0.25).astype(np.int64)
        numbers = random.geometric(0.01, (count, NUMBERS)) - 3  # some below 0, as Criteo's
        hashes = random.integers(0, 1 << 32, (count, HASHED))
        has_number = random.random(numbers.shape) >= EMPTY
        has_hash = random.random(hashes.shape) >= EMPTY
        columns = [
            labels.astype(str).tolist(),
            *(_texts(*column, "%d") for column in zip(numbers.T, has_number.T, strict=True)),
            *(_texts(*column, "%08x") for column in zip(hashes.T, has_hash.T, strict=True)),
        ]
        lines = map("\t".join, zip(*columns, strict=True))
        (folder / f"part-{part}.tsv").write_text("\n".join(lines) + "\n")
        save_keys(
            folder, part, labels, (numbers * has_number).astype(np.float32), hashes * has_hash
        )


def _texts(numbers: np.ndarray, there: np.ndarray, form: str) -> list[str]:
    pairs = zip(numbers.tolist(), there.tolist(), strict=True)
    return [form % number if is_there else "" for number, is_there in pairs]


# -- images --------------------------------------------------------------------------------------


def make_memory(folder: Path, count: int) -> None:
    """uint8 images of 28x28 and their labels, as arrays."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = random.integers(0, 10, count)
    np.save(folder / "images.npy", images)
    np.save(folder / "labels.npy", labels)
    save_keys(folder, 0, labels, images)


def make_jpeg(folder: Path, count: int) -> None:
    """Cuts of two photographs, enlarged to 512x496, some mirrored, as JPEG in class folders."""
    from sklearn.datasets import load_sample_images

    photographs = dict(zip(CLASSES, load_sample_images().images, strict=True))
    colors, counts = [], []
    for number, (name, photograph) in enumerate(photographs.items()):
        (folder / name).mkdir()
        own = count * (number + 1) // len(CLASSES) - count * number // len(CLASSES)
        with ThreadPoolExecutor() as pool:
            made = pool.map(
                lambda image, name=name, photograph=photograph: write_cut(
                    photograph, folder / name / f"{image:04}.jpg", seed=image
                ),
                range(own),
            )
            colors.append(np.mean(list(made), axis=0))
        counts.append(own)
    np.savez(folder.with_suffix(".npz"), colors=colors, counts=counts)


def write_cut(photograph: np.ndarray, path: Path, seed: int) -> np.ndarray:
    """Write a cut, enlarged and perhaps mirrored, as JPEG; returns its mean color."""
    from PIL import Image

    random = np.random.default_rng(seed)
    size = random.integers(160, 220)
    height, width = size * HEIGHT // WIDTH, size
    top = random.integers(photograph.shape[0] - height + 1)
    left = random.integers(photograph.shape[1] - width + 1)
    cut = photograph[top : top + height, left : left + width]
    image = Image.fromarray(cut[:, :: random.choice([-1, 1])].copy())
    image = image.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
    image.save(path, quality=QUALITY)
    return np.asarray(image).mean(axis=(0, 1))
