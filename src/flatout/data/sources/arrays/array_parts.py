"""Arrays in parts: inputs, targets and weights, and a fraction that is held out for validation."""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset

from flatout.data.batches.batch import map_tensors, named_tensors
from flatout.data.batches.tensors import are_arrays, is_array, parts_of
from flatout.data.sources.arrays.arrays import Arrays
from flatout.errors import DataError


def with_parts(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any, Any]:
    """Return data with their weights, and the part of them that is held out for validation.

    Args:
        x: inputs, or all of the data.
        y: targets, where `x` has only inputs.
        sample_weight: one number per sample, or None.
        share: fraction of the samples to hold out, from the end; 0 for none.

    Returns:
        x and y for `as_source`, and the held-out data or None.

    Raises:
        DataError: weights or a fraction are given for data that are no arrays, weights are given
            twice, or a fraction leaves a part without samples.
    """
    if sample_weight is None and not share:
        return x, y, None
    if isinstance(x, Arrays) and y is None and sample_weight is None:
        split = _split(len(x), share)
        return x.part(0, split), None, x.part(split, len(x))
    parts = _parts(x, y, sample_weight)
    if not share:
        return parts, None, None
    first, last = split_validation(*parts, share)
    return first, None, last


def split_validation(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[Any, Any]:
    """Return samples for training, and the fraction at the end for validation, as Keras does.

    Raises:
        DataError: the data are not arrays, or a part would be empty.
    """
    if not are_arrays(x):
        raise DataError(
            "validation_split needs arrays, whose end can be held out",
            do="pass validation_data; a pipeline has .split(), and torch.utils.data.random_split "
            "parts a Dataset",
        )
    split = _split(len(next(named_tensors("", x))[1]), share)
    first = tuple(map_tensors(lambda part: part[:split], part) for part in (x, y, sample_weight))
    last = tuple(map_tensors(lambda part: part[split:], part) for part in (x, y, sample_weight))
    return first, last


def _parts(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    if y is None and isinstance(x, TensorDataset):
        x = x.tensors
    weight = None
    if y is None and isinstance(x, tuple):
        x, y, weight = parts_of(x)
    if weight is not None and sample_weight is not None:
        raise DataError("sample_weight was given beside data that have their own weights")
    if sample_weight is not None and not is_array(sample_weight):
        raise DataError(
            "sample_weight: expected a tensor or array with a number per sample, found a "
            f"{type(sample_weight).__name__}"
        )
    if sample_weight is not None and (not are_arrays(x) or y is None):
        raise DataError(
            f"sample_weight goes with arrays x and y, found a {type(x).__name__}",
            do="let it give (x, y, weight) itself",
        )
    return x, y, weight if sample_weight is None else sample_weight


def _split(samples: int, share: float) -> int:
    split = int(samples * (1 - share))
    if not 0 < split < samples:
        raise DataError(
            f"validation_split={share} leaves {split} of {samples} samples to train on",
            do="choose a share between 0 and 1 that leaves both parts at least one sample",
        )
    return split
