"""Comparison of training and validation data.

It finds samples that are in both, classes that training lacks, and normalizations whose statistics
cover both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flatout.observe.chance import RICH, is_no_chance
from flatout.observe.observation import Scaling, Table
from flatout.observe.samples import Moments, Samples, moments_of
from flatout.observe.scalers import Scalers
from flatout.observe.series import joined, place_in, scaled_to_range
from flatout.observe.spread import has_median, held_ends, missed_end

# Smallest share of different samples among the training samples. Below it, equal samples in
# validation prove nothing.
_DIFFERENT = 0.5
# Minimum ratio of the training samples' mean to the mean of all samples, both as distances from
# zero.
_FARTHER = 20.0
# _MEAN_OFF: largest distance of a scaled column's mean from 0; _DEVIATION_OFF: largest distance of
# its standard deviation from 1.
_MEAN_OFF, _DEVIATION_OFF = 1e-4, 1e-3
# Maximum number of classes in both training and validation, where a sorted dataset was split within
# a class.
_AT_SPLIT = 1
# Minimum number of samples for a comparison of means.
_FEWEST = 50


def compare(sets: Sequence[tuple[Any, Samples | None]], scalers: Scalers) -> None:
    """Fill in `shared_rows`, `shared_windows` and `scaling` of data used only for evaluation."""
    trained = [samples for facts, samples in sets if facts.in_training]
    known = [samples for samples in trained if samples is not None]
    if not trained or len(known) < len(trained):
        return
    for facts, held_out in sets:
        if facts.in_training or held_out is None:
            continue
        facts.shared_rows = _shared_rows(held_out, known)
        facts.shared_files = held_out.is_named
        shared, of = facts.shared_rows or (0, 1)
        if isinstance(facts, Table) and (shared == of or _is_whole(facts, held_out, known)):
            facts.shared_rows = None  # which of its rows are for training is unknown
        elif shared < of:
            if facts.shared_rows is not None:  # otherwise equal windows prove nothing
                facts.shared_windows = _shared_windows(held_out, known)
            facts.scaling = (
                scalers.of_both(known, held_out)
                or _by_moments(known, held_out)
                or _of_series(known, held_out)
            )


def compare_classes(loaders: Sequence[Any]) -> None:
    """Fill in `unseen_classes` of loaders used only for evaluation.

    Data that were split in the order of their labels have at most one class in both parts. With
    more common classes, the order may be intended, such as tasks that are learned one after
    another.
    """
    trained = [loader.label_sizes for loader in loaders if loader.facts.in_training]
    held_out = [loader for loader in loaders if not loader.facts.in_training]
    known = {label for sizes in trained for label in sizes}
    is_split = all(len(loader.label_sizes.keys() & known) <= _AT_SPLIT for loader in held_out)
    if not (trained and all(trained) and is_split):
        return  # or the classes of a part of training are unknown
    for loader in held_out:
        unseen = sorted(loader.label_sizes.keys() - known)
        samples = sum(loader.label_sizes[label] for label in unseen)
        loader.facts.unseen_classes = (unseen, samples) if unseen else None


def _of_series(trained: Sequence[Samples], held_out: Samples) -> Scaling | None:
    if len(trained) != 1 or trained[0].series is None or held_out.series is None:
        return None
    mine, theirs, whole = trained[0].series, held_out.series, trained[0].whole
    if mine.shape[1] != theirs.shape[1]:
        return None
    wholes = [joined(mine, theirs)]
    # Training and validation may be parts of a series whose rest is the test set.
    if whole is not None and place_in(theirs, whole) is not None:
        wholes.append(whole)
    alone = moments_of(mine)
    for both in wholes:
        scaling = _scaled(alone, moments_of(both)) or scaled_to_range(mine, both)
        if scaling is not None:
            return scaling
    return None


def _shared_rows(held_out: Samples, trained: Sequence[Samples]) -> tuple[int, int] | None:
    if not held_out.rows or any(item.rows is None for item in trained):
        return None
    if any(item.is_named != held_out.is_named for item in trained):
        return None
    rows = [row for item in trained for row in item.rows or ()]
    known = set(rows)
    if len(known) < _DIFFERENT * len(rows):
        return None  # samples of few values are often equal
    shared = sum(row in known for row in held_out.rows)
    bits = min(item.bits for item in trained)
    is_rich = min(bits, held_out.bits) >= RICH
    if not (is_rich or is_no_chance(shared, rows, held_out.rows, bits)):
        return None
    return shared, len(held_out.rows)


def _is_whole(table: Table, mine: Samples, trained: Sequence[Samples]) -> bool:
    known = set(mine.rows or ())
    rows = [row for item in trained for row in item.rows or ()]
    is_in_parts = (table.batch_size or 0) < (table.length or 0)
    return is_in_parts and all(row in known for row in rows)


def _shared_windows(held_out: Samples, trained: Sequence[Samples]) -> int:
    windows = [pair for item in trained for pair in item.windows or ()]
    before, after = {first for first, _ in windows}, {last for _, last in windows}
    # Constant windows are equal by chance.
    mine = [(first, last) for first, last in held_out.windows or () if first != last]
    return sum(first in after or last in before for first, last in mine)


def _by_moments(trained: Sequence[Samples], held_out: Samples) -> Scaling | None:
    moments = [item.moments for item in trained if item.moments is not None]
    other = held_out.moments
    if len(moments) < len(trained) or other is None:
        return None
    alone = _joined(moments)
    if alone.mean.shape != other.mean.shape or other.count + alone.count < _FEWEST:
        return None
    wholes = [alone.with_others(other)]
    # The rest of the table that both are picked from may be a test set that was not read yet.
    whole = held_out.of_all
    if whole is not None and all(whole.is_of_same(item.of_all) for item in trained):
        wholes.append(whole)
    for both in wholes:
        scaling = (
            _scaled(alone, both)
            or _by_figures(alone, both, held_out.figures)
            or _by_spread(alone, both, held_out.figures)
        )
        if scaling is not None:
            return scaling
    return None


def _by_spread(alone: Moments, both: Moments, figures: Sequence[Any]) -> Scaling | None:
    mine, all_of = alone.spread, both.spread
    if mine is None or all_of is None:
        return None
    held_out = both.count - alone.count
    for misses, is_held in (
        (missed_end(mine, all_of, both.mean, both.variance), False),
        (held_ends(mine, all_of, figures), True),
    ):
        if misses is not None:
            by = "minimum and maximum"
            return Scaling(by, None, both.count, held_out, misses=misses, is_held=is_held)
    return Scaling("median", None, both.count, held_out) if has_median(mine, all_of) else None


def _by_figures(alone: Moments, both: Moments, figures: Sequence[Any]) -> Scaling | None:
    varied = _varied(both)
    if not varied.any():
        return None
    for deviation in _deviations(both):
        if not any(_apart(item, deviation, deviation, varied) < _DEVIATION_OFF for item in figures):
            continue
        off = min(_apart(item, both.mean, deviation, varied) for item in figures)
        off_training = min(_apart(item, alone.mean, deviation, varied) for item in figures)
        if off < _MEAN_OFF and off_training > _FARTHER * max(off, 1e-5):
            held_out = both.count - alone.count
            by = "mean and standard deviation"
            return Scaling(by, None, both.count, held_out, off, off_training, is_held=True)
    return None


def _deviations(moments: Moments) -> list[Any]:
    formulas = (1.0, moments.count / (moments.count - 1))
    return [(moments.variance * formula) ** 0.5 for formula in formulas]


def _apart(figures: Any, wanted: Any, deviation: Any, varied: Any) -> float:
    return float((abs(figures - wanted)[varied] / deviation[varied]).max())


def _scaled(alone: Moments, both: Moments) -> Scaling | None:
    for mine, all_of in ((alone, both), (_whole(alone), _whole(both))):
        off, off_training = _off(all_of), _off(mine)
        if off < _MEAN_OFF and off_training > _FARTHER * max(off, 1e-5) and _is_one(all_of):
            held_out = both.count - alone.count
            by = "mean and standard deviation"
            return Scaling(by, None, both.count, held_out, off, off_training)
    return None


def _joined(parts: Iterable[Moments]) -> Moments:
    first, *others = parts
    for item in others:
        first = first.with_others(item)
    return first


def _whole(moments: Moments) -> Moments:
    mean = moments.mean.mean(keepdims=True)
    squares = (moments.variance + moments.mean**2).mean(keepdims=True)
    return Moments(moments.count, mean, squares - mean**2)


def _varied(moments: Moments) -> Any:
    return moments.variance > 1e-6


def _off(moments: Moments) -> float:
    means = abs(moments.mean[_varied(moments)])
    return float(means.max()) if means.size else 1.0


def _is_one(moments: Moments) -> bool:
    result = moments.variance[_varied(moments)]
    formulas = (1.0, moments.count / (moments.count - 1))
    return any(bool((abs(result * formula - 1) < _DEVIATION_OFF).all()) for formula in formulas)


def sets_of(loaders: Iterable[Any], tables: Iterable[Any]) -> Iterator[tuple[Any, Samples | None]]:
    """Yield the facts and samples of all loaders and tables."""
    for item in (*loaders, *tables):
        yield item.facts, item.samples
