"""Conversion of a user's arrays, samples and batches to tensors."""

from __future__ import annotations

import warnings
from collections import UserDict
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.data.batches.batch import Batch, Tensors, named_tensors, tensors_of_object
from flatout.data.batches.jagged_batch import (
    holds_object,
    is_surely_jagged,
    samples_without_targets,
)
from flatout.errors import DataError

Others: TypeAlias = list[tuple[str, Any]]
"""Names and values of parts that are no tensors."""


def is_array(value: Any) -> bool:
    """Return whether `value` is a tensor, a numpy array, or an object that numpy reads as one."""
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def are_arrays(value: Any) -> bool:
    """Return whether `value` is an array, or a tuple, list or dict of only arrays."""
    if isinstance(value, dict):
        return all(map(are_arrays, value.values()))
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(are_arrays, value))
    return is_array(value)


def as_tensor(name: str, value: Any, where: str | None = None) -> Tensor:
    """Return a tensor of the same dtype; it shares memory with a numpy array where torch can.

    Raises:
        DataError: `value` is no array, holds values that are no numbers, or is sparse or nested.
    """
    if isinstance(value, Tensor):
        if value.is_nested:
            raise DataError(
                f"{name}: expected a dense tensor, found a nested one",
                where=where,
                do="give torch.nested.to_padded_tensor(...) and lengths, and nest it in forward",
            )
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


def as_tensors(
    name: str, value: Any, where: str | None = None, others: Others | None = None
) -> Tensors:
    """Return a tensor, or a tuple or dict of tensors, from arrays in the same structure."""
    if isinstance(value, UserDict):  # the type that tokenizers return
        value = value.data
    if others is not None:
        if value is None or isinstance(value, (bool, int, float)):
            others.append((name, value))
            return value  # type: ignore[return-value]
        if tensors_of_object(value) is not None:
            return value  # type: ignore[no-any-return]
    if not isinstance(value, (tuple, list, dict)):
        return as_tensor(name, value, where)
    if not value:
        raise DataError(f"{name}: expected arrays, found an empty {type(value).__name__}")
    if isinstance(value, dict):
        return {
            key: as_tensors(f"{name}[{key!r}]", part, where, others) for key, part in value.items()
        }
    return tuple(as_tensors(f"{name}[{i}]", part, where, others) for i, part in enumerate(value))


def parts_of(value: Any, where: str | None = None) -> tuple[Any, Any, Any]:
    """Return (inputs, targets, weight) of x, (x, y) or (x, y, weight)."""
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


def as_batch(value: Any, where: str, *, is_jagged: bool | None = None) -> Batch:
    if isinstance(value, Batch):
        return value
    # A PackedSequence is also a tuple.
    is_tuple = isinstance(value, (tuple, list)) and not tensors_of_object(value)
    parts = parts_of(value, where) if is_tuple else (value, None, None)
    others: Others = []
    inputs, targets, weight = _converted(parts, where, others)
    size = _size_of(targets, weight)
    if is_jagged or _is_jagged(inputs, size, looks=is_jagged is None):
        return _jagged(inputs, targets, weight, size, where)
    for name, other in others:
        as_tensor(name, other, where)  # refuse values that are no tensors
    size = count_rows(inputs, targets, weight, where, do=_SAY_JAGGED)
    if size == 0:
        raise DataError("the batch is empty: expected at least 1 sample, found 0", where=where)
    return Batch(inputs, targets, weight, None, size)


def jagged(inputs: Any, targets: Any = None, weight: Any = None, *, samples: Any = None) -> Batch:
    """Make a batch whose inputs have no row for each sample; a loader returns it for (x, y).

    It is never split into micro-batches or over ranks; each rank reads its own batches. Most flat
    ids with offsets and graphs are detected without this function, which is for all other inputs.

    Args:
        inputs: input of the model: tensors, a tuple or dict of tensors, numbers and None, or an
            object that holds tensors (a dataclass, or one with `.to(device)`).
        targets: targets with a row for each sample, or None.
        weight: weight of each sample, of shape (samples,), or None.
        samples: number of samples, if there are neither targets nor weights.

    Raises:
        DataError: a part is no array, targets and weight differ in length, or the number of samples
            is not known.
    """
    where = "flatout.data.jagged"
    inputs, targets, weight = _converted((inputs, targets, weight), where, [])
    known = _size_of(targets, weight)
    if samples is not None and known is not None and known != samples:
        raise DataError(
            f"samples is {samples:,}, but the targets have {known:,} rows",
            where=where,
            do="leave samples out",
        )
    return _jagged(inputs, targets, weight, known if samples is None else int(samples), where)


_SAY_JAGGED = (
    "give as many of each; where inputs have no row for each sample (flat ids with offsets, packed "
    "sequences, graphs), give flatout.data.jagged(inputs, targets) in place of (inputs, targets)"
)


def _converted(
    parts: tuple[Any, Any, Any], where: str, others: Others
) -> tuple[Tensors, Tensors | None, Tensor | None]:
    inputs, targets, weight = parts
    inputs = as_tensors("inputs", inputs, where, others)
    if targets is None and isinstance(of_graph := getattr(inputs, "y", None), Tensor):
        targets = of_graph
    targets = None if targets is None else as_tensors("targets", targets, where)
    return inputs, targets, None if weight is None else as_tensor("weight", weight, where)


def _size_of(targets: Tensors | None, weight: Tensor | None) -> int | None:
    first = next(named_tensors("", (targets, weight)), None)
    return None if first is None or not first[1].dim() else len(first[1])


def _is_jagged(inputs: Tensors, size: int | None, *, looks: bool) -> bool:
    if isinstance(inputs, Tensor):
        return False
    if holds_object(inputs):
        return True
    lengths = {len(tensor) for _, tensor in named_tensors("", inputs) if tensor.dim()}
    if size is None:
        return len(lengths) > 1 and samples_without_targets(inputs) is not None
    return (looks or lengths != {size}) and is_surely_jagged(inputs, size)


def _jagged(
    inputs: Tensors, targets: Tensors | None, weight: Tensor | None, size: int | None, where: str
) -> Batch:
    if size is None:
        size = samples_without_targets(inputs)
    if size is None:
        raise DataError(
            "nothing tells how many samples the batch has",
            where=where,
            do="give targets, or flatout.data.jagged(inputs, samples=...)",
        )
    if targets is not None or weight is not None:
        count_rows((), targets, weight, where)
    if size <= 0:
        raise DataError("the batch is empty: expected at least 1 sample, found 0", where=where)
    return Batch(inputs, targets, weight, None, size, is_jagged=True)


def count_rows(
    inputs: Tensors,
    targets: Tensors | None,
    weight: Tensor | None,
    where: str | None = None,
    do: str | None = None,
) -> int:
    """Return the number of samples, equal in all tensors."""
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
                do=_advice_for_flattened(named[0][1], name, len(tensor)) or do,
            )
    if weight is not None and weight.ndim != 1:
        raise DataError(
            f"weight: expected one number per sample, found shape {tuple(weight.shape)}",
            where=where,
        )
    return size


def _advice_for_flattened(inputs: Tensor, name: str, rows: int) -> str | None:
    if inputs.ndim < 2 or rows != inputs.shape[0] * inputs.shape[1]:
        return None
    first, second = inputs.shape[:2]
    shape = f"{first}, {second}"
    return (
        f"{name} are flattened. If each row of inputs is a sample, pass {name}.view({shape}). "
        f"If the {second:,} samples lie along the second dimension, pass inputs.transpose(0, 1) "
        f"and {name}.view({shape}).t(), and let forward take samples along the first. "
        f"Or use flatout.data.jagged(inputs, {name}), which takes each batch whole"
    )


def _from_numpy(name: str, array: npt.NDArray[Any], where: str | None) -> Tensor:
    is_text = array.dtype.hasobject and all(isinstance(value, str) for value in array.flat)
    if array.dtype.hasobject and not is_text:
        raise DataError(
            f"{name}: expected numbers, found an array of Python objects (dtype {array.dtype})",
            where=where,
            do="pad rows of different lengths, then convert with .astype(numpy.float32); hand a "
            "table with texts over as flatout.data.table(frame, target=...)",
        )
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"{name}: expected numbers, found dtype {array.dtype}{' of text' * is_text}",
            where=where,
            do="encode it as numbers, for example labels as integers from 0",
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    # torch accepts no negative or odd strides.
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        with warnings.catch_warnings():
            # Read-only memory is fine: no code here writes into the data.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(
            f"{name}: torch has no dtype for numpy's {array.dtype}",
            where=where,
            do="convert it with .astype(numpy.float32)",
        ) from error
