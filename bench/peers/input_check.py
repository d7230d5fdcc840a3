"""Whether a peer's batches hold the rows of the files, each once, whole, and shuffled.

A row's key is a number that every value of the row changes. So the keys of a pass, sorted, are
those of the files, sorted; and their order shows whether rows were shuffled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

# Of the rows, how many may still be followed by the row that follows in the file.
_NEIGHBORS = 0.02
# Levels of 255 by which a decoder's mean color may differ from that of the pixels encoded.
_LEVELS = 1.5


class Wrong(Exception):
    """The batches are not what the files hold."""


def row_keys(labels: Any, *inputs: Any) -> np.ndarray:
    """A uint64 for each row; inputs that are floats count by their bits.

    Raises:
        Wrong: floats of another dtype than float32.
    """
    random = np.random.default_rng(0)
    keys = np.zeros(len(labels), np.uint64)
    for values in (np.asarray(labels).astype(np.int64), *inputs):
        rows = np.ascontiguousarray(values).reshape(len(keys), -1)
        if rows.dtype.kind == "f":
            if rows.dtype != np.float32:
                raise Wrong(f"expected float32 values, found {rows.dtype}")
            rows = rows.view(np.int32)
        factors = random.integers(1, 1 << 62, rows.shape[1], dtype=np.uint64)
        keys += (rows.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64)
    return keys


def check_rows(batches: Iterable[tuple[Any, ...]], known: np.ndarray) -> None:
    """Compare the batches, (labels, *inputs) each, with the keys of the files' rows in order.

    Raises:
        Wrong: a row is missing, twice, damaged or not shuffled.
    """
    found = np.concatenate([row_keys(*map(np.asarray, batch)) for batch in batches])
    if len(found) != len(known):
        raise Wrong(f"expected {len(known):,} rows, found {len(found):,}")
    order = np.argsort(known, kind="stable")
    places = order[np.searchsorted(known, found, sorter=order).clip(max=len(known) - 1)]
    wrong = known[places] != found
    if wrong.any():
        raise Wrong(f"{wrong.sum():,} of {len(found):,} rows are not those of the files")
    if len(np.unique(places)) != len(np.unique(known)):
        raise Wrong("some rows came twice and others not at all")
    check_order(np.diff(places) == 1)


def check_order(neighbors: np.ndarray) -> None:
    """Raise Wrong where too many rows are followed by the row that follows in the files."""
    share = float(neighbors.mean())
    if share > _NEIGHBORS + 2 / len(neighbors):
        raise Wrong(f"not shuffled: {share:.0%} of the rows are followed by the next of the file")


def check_images(batches: Iterable[tuple[Any, ...]], known: Path, size: int) -> None:
    """Compare image batches, (labels, pixels) each, with the classes' counts and mean colors.

    Raises:
        Wrong: shape, dtype, count or colors are not those of the files, or classes are not mixed.
    """
    labels, colors = [], []
    for labels_of_batch, pixels in batches:
        pixels = np.asarray(pixels)
        if pixels.dtype != np.uint8 or sorted(pixels.shape[1:]) != [3, size, size]:
            raise Wrong(
                f"expected uint8 pixels {size}x{size}x3, found {pixels.dtype} {pixels.shape}"
            )
        if pixels.shape[1] == 3:
            pixels = pixels.transpose(0, 2, 3, 1)
        labels.append(np.asarray(labels_of_batch))
        colors.append(pixels.mean(axis=(1, 2)))
    found, means = np.concatenate(labels), np.concatenate(colors)
    with np.load(known) as expected:
        counts, classes = expected["counts"], expected["colors"]
    if not np.array_equal(np.bincount(found, minlength=len(counts)), counts):
        raise Wrong(f"expected {counts} images of each class, found {np.bincount(found)}")
    for number, color in enumerate(classes):
        difference = np.abs(means[found == number].mean(axis=0) - color).max()
        if difference > _LEVELS:
            raise Wrong(f"class {number}: the mean color is off by {difference:.1f} levels")
    if (np.diff(found) != 0).mean() < 0.2:
        raise Wrong("not shuffled: the classes come one after the other")
