"""Targets of rows, for stages that count classes or spread them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.batches.form import Leaf
from flatout.data.execution.samples import Costs, Samples, first_good, known_targets
from flatout.data.reading.block import Numbers, rows_between
from flatout.data.reading.buffers import Buffers
from flatout.errors import DataError

# Samples that are made together.
_CHUNK = 4096


def targets_of(samples: Samples, numbers: Numbers, what: str) -> tuple[Numbers, npt.NDArray[Any]]:
    """Return the rows of `numbers` that can be read, and their targets, shape (rows, ...).

    Args:
        samples: samples whose targets are wanted. Samples are made if targets are not known yet.
        numbers: indices of rows.
        what: name of the caller, for messages.

    Raises:
        DataError: samples have no target, or several, or targets of different lengths.
    """
    known = known_targets(samples)
    if known is not None:
        return numbers, known[numbers]
    kept, targets = [], []
    buffers, costs = Buffers(), Costs()
    for start in range(0, max(1, len(numbers)), _CHUNK):
        if len(numbers):
            block = samples.make(numbers[start : start + _CHUNK], buffers, 0, costs)
        else:  # this rank has no row: it takes the form of the targets from a row of another rank
            block = rows_between(first_good(samples, buffers, 0, costs), 0, 0)
        target = samples.form.targets
        values = block.columns[target.column] if isinstance(target, Leaf) else None
        if not isinstance(values, np.ndarray):
            words = "none" if target is None else "several, or of different lengths"
            raise DataError(f"{what} wants one target a sample; found {words}")
        kept.append(block.numbers)
        targets.append(values.copy())
    return np.concatenate(kept), np.concatenate(targets)


def labels_of(samples: Samples, numbers: Numbers, what: str) -> tuple[Numbers, npt.NDArray[Any]]:
    """Return the same for rows with one class each; labels have shape (rows,)."""
    kept, labels = targets_of(samples, numbers, what)
    if labels.size != len(kept):
        raise DataError(f"{what} wants one target a sample; found shape {labels.shape[1:]}")
    labels = labels.reshape(-1)
    different = len(np.unique(labels))
    if labels.dtype.kind == "f" and 2 * different > len(labels) > 2:
        raise DataError(
            f"{what} needs classes; found {different:,} different targets in {len(labels):,} "
            "samples",
            do="leave it out for targets that are numbers",
        )
    return kept, labels
