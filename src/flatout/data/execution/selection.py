"""Which rows take part: splits, filters, and the part of a rank. All as ascending row numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.block import Numbers
from flatout.data.execution.buffers import Buffers
from flatout.data.execution.samples import Costs, Samples, name_of
from flatout.data.form import Leaf
from flatout.data.order import order
from flatout.data.stages import Shard, Split
from flatout.errors import DataError

_CHUNK = 4096
_QUIET_S = 1.0


def split(numbers: Numbers, stage: Split, labels: npt.NDArray[Any] | None) -> Numbers:
    """One of the two parts of rows, in ascending order.

    Args:
        numbers: the rows to split.
        stage: how.
        labels: of each of these rows, to be shared out class by class.
    """
    if stage.by == "order":
        cut = _share(len(numbers), stage.fraction)
        return numbers[:cut] if stage.first else numbers[cut:]
    if labels is None:
        groups = [np.arange(len(numbers))]
    else:
        groups = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    chosen = np.zeros(len(numbers), bool)
    for at, group in enumerate(groups):
        drawn = group[order(len(group), stage.seed, at)]
        chosen[drawn[: _share(len(group), stage.fraction)]] = True
    part = numbers[chosen if stage.first else ~chosen]
    if not len(part):
        raise DataError(
            f"split({stage.fraction}) leaves {'the first' if stage.first else 'the second'} part "
            f"empty: there are {len(numbers):,} samples"
        )
    return part


def _share(count: int, fraction: float) -> int:
    # Rounded to twelve digits first, or 0.9 of 10 would be less than 9.
    return int(np.floor(round(count * fraction, 12)))


def filtered(
    numbers: Numbers,
    samples: Samples,
    function: Callable[..., Any],
    say: Callable[[str], None],
) -> Numbers:
    """The rows for which the function is true, found by one pass over all of them."""
    kept = []
    buffers, costs = Buffers(), Costs()
    said = time.monotonic()
    for start in range(0, len(numbers), _CHUNK):
        block = samples.make(numbers[start : start + _CHUNK], buffers, 0, costs)
        form = samples.form
        wanted = [bool(function(*form.sample(block, row))) for row in range(len(block))]
        kept.append(block.numbers[np.array(wanted, bool)])
        if time.monotonic() - said > _QUIET_S:
            said = time.monotonic()
            say(f"filter {name_of(function)}: looked at {start + len(block):,} of {len(numbers):,}")
    found = np.concatenate(kept)
    if not len(found):
        raise DataError(f"filter {name_of(function)} leaves none of {len(numbers):,} samples")
    return found


def labels_of(
    numbers: Numbers, samples: Samples, known: npt.NDArray[Any] | None
) -> npt.NDArray[Any]:
    """The targets of rows, to split by class.

    Raises:
        DataError: the target is not one number a row, or no class.
    """
    if known is not None:
        return _classes(known[numbers])
    found = []
    buffers, costs = Buffers(), Costs()
    for start in range(0, len(numbers), _CHUNK):
        block = samples.make(numbers[start : start + _CHUNK], buffers, 0, costs)
        target = samples.form.targets
        values = block.columns[target.column] if isinstance(target, Leaf) else None
        if not isinstance(values, np.ndarray) or values.size != len(block):
            raise DataError(
                "split(stratify=True) shares out classes, so it wants one target a sample; "
                f"found {target if values is None else np.shape(values)}"
            )
        found.append(values.reshape(-1).copy())
    return _classes(np.concatenate(found))


def _classes(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same, unless about every row has a target of its own: those are no classes."""
    different = len(np.unique(labels))
    if labels.dtype.kind == "f" and 2 * different > len(labels) > 2:
        raise DataError(
            f"split(stratify=True) shares out classes; found {different:,} different targets in "
            f"{len(labels):,} samples",
            do="leave stratify out for targets that are numbers",
        )
    return labels


def shard(numbers: Numbers, stage: Shard, file_rows: Numbers | None) -> Numbers:
    """A rank's own rows: whole files, or a range. Of presharded files, those of its node.

    Args:
        numbers: all rows.
        stage: rank and world size; "files" insists on whole files.
        file_rows: where each file's rows begin, and at last where they end.
    """
    rank, world = stage.beside if stage.presharded else (stage.rank, stage.world_size)
    if world == 1:
        return numbers
    files = 0 if file_rows is None else len(file_rows) - 1
    if stage.by == "files":
        if file_rows is None or files < world:
            raise DataError(
                f"sharding by files wants at least {world} files, found {files}",
                do='use by="rows", or by="batch"',
            )
        owner = _balanced(np.diff(file_rows), world)
        mine = owner[np.searchsorted(file_rows, numbers, side="right") - 1] == rank
        return np.asarray(numbers[mine])
    return numbers[len(numbers) * rank // world : len(numbers) * (rank + 1) // world]


def _balanced(sizes: Numbers, ranks: int) -> Numbers:
    """Which rank gets which file: the largest first, each to the rank that has least so far."""
    owner = np.empty(len(sizes), np.int64)
    load = np.zeros(ranks, np.int64)
    for at in np.argsort(-sizes, kind="stable"):
        owner[at] = int(load.argmin())
        load[owner[at]] += sizes[at]
    return owner
