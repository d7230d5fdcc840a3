"""What users hand over, as tensors: arrays, samples' parts, whole batches."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.data.batch import Batch, Tensors, named_tensors
from flatout.errors import DataError


def is_array(value: Any) -> bool:
    """Whether `value` is a tensor, a numpy array, or something that numpy reads as one."""
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def are_arrays(value: Any) -> bool:
    """Whether this is an array, or a tuple, list or dict of arrays alone."""
    if isinstance(value, dict):
        return all(map(are_arrays, value.values()))
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(are_arrays, value))
    return is_array(value)


def as_tensor(name: str, value: Any, where: str | None = None) -> Tensor:
    """A tensor of the same dtype; numpy arrays share their memory with it where torch can.

    Raises:
        DataError: `value` is no array, holds something else than numbers, or is sparse.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise DataError(
                f"{name}: expected a dense tensor, found layout {value.layout}",
                where=where,
                do="use .to_dense()",
            )
        return value
    if not is_array(value):
        raise DataError(
            f"{name}: expected a tensor or a numpy array, found {type(value).__name__}",
            where=where,
            do="convert it, for example with numpy.asarray(...)",
        )
    return _from_numpy(name, np.asarray(value), where)


def as_tensors(name: str, value: Any, where: str | None = None) -> Tensors:
    """A tensor, or a tuple or dict of tensors, from arrays in the same structure.

    Raises:
        DataError: as `as_tensor`, or a tuple, list or dict is empty.
    """
    if not isinstance(value, (tuple, list, dict)):
        return as_tensor(name, value, where)
    if not value:
        raise DataError(f"{name}: expected arrays, found an empty {type(value).__name__}")
    if isinstance(value, dict):
        return {key: as_tensors(f"{name}[{key!r}]", part, where) for key, part in value.items()}
    return tuple(as_tensors(f"{name}[{i}]", part, where) for i, part in enumerate(value))


def parts_of(value: Any, where: str | None = None) -> tuple[Any, Any, Any]:
    """(inputs, targets, weight) of what a dataset or loader gives: x, (x, y) or (x, y, weight).

    Raises:
        DataError: a tuple or list has no part or more than three.
    """
    if not isinstance(value, (tuple, list)):
        return value, None, None
    if not 1 <= len(value) <= 3:
        raise DataError(
            f"expected x, (x, y) or (x, y, weight), found {len(value)} parts",
            where=where,
            do="put several inputs into one tuple: ((a, b), y)",
        )
    inputs, targets, weight = (*value, None, None)[:3]
    return inputs, targets, weight


def as_batch(value: Any, where: str) -> Batch:
    """A Batch from what a loader or an iterable gives.

    Raises:
        DataError: a part is no array, the batch is empty, or its parts differ in length.
    """
    if isinstance(value, Batch):
        return value
    inputs, targets, weight = parts_of(value, where)
    inputs = as_tensors("inputs", inputs, where)
    targets = None if targets is None else as_tensors("targets", targets, where)
    weight = None if weight is None else as_tensor("weight", weight, where)
    size = count_rows(inputs, targets, weight, where)
    if size == 0:
        raise DataError("the batch is empty: expected at least 1 sample, found 0", where=where)
    return Batch(inputs, targets, weight, None, size)


def count_rows(
    inputs: Tensors, targets: Tensors | None, weight: Tensor | None, where: str | None = None
) -> int:
    """How many samples all the tensors have.

    Raises:
        DataError: a tensor has no rows or another number of them, or `weight` is no vector.
    """
    parts = {"inputs": inputs, "targets": targets, "weight": weight}
    named = [pair for name, part in parts.items() for pair in named_tensors(name, part)]
    for name, tensor in named:
        if tensor.ndim == 0:
            raise DataError(
                f"{name}: expected a row per sample, found a single number", where=where
            )
    first, size = named[0][0], len(named[0][1])
    for name, tensor in named[1:]:
        if len(tensor) != size:
            raise DataError(
                f"{first} and {name} differ in length: {size:,} and {len(tensor):,} samples",
                where=where,
            )
    if weight is not None and weight.ndim != 1:
        raise DataError(
            f"weight: expected one number per sample, found shape {tuple(weight.shape)}",
            where=where,
        )
    return size


def _from_numpy(name: str, array: npt.NDArray[Any], where: str | None) -> Tensor:
    if array.dtype.hasobject:
        raise DataError(
            f"{name}: expected numbers, found an array of Python objects (dtype {array.dtype})",
            where=where,
            do="pad rows of different lengths, then convert with .astype(numpy.float32); hand a "
            "table with texts over as flatout.data.table(frame, target=...)",
        )
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{name}: expected numbers, found dtype {array.dtype}",
            where=where,
            do="encode it as numbers, for example labels as integers from 0",
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # torch takes no negative or odd strides.
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        with warnings.catch_warnings():
            # Read-only memory is fine: nothing here writes into the data.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(
            f"{name}: torch has no dtype for numpy's {array.dtype}",
            where=where,
            do="convert it with .astype(numpy.float32)",
        ) from error
