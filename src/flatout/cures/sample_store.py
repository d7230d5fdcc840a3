"""Samples of one form, as rows in memory that all processes of a loader share."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from flatout.data import Buffers, SharedRows, layout_of
from flatout.measure import available_bytes

# _LOOK_EVERY: number of kept samples between two checks of free memory. _RESERVE: bytes that must
# stay free.
_LOOK_EVERY, _RESERVE = 256, 512 * 2**20

Columns = Mapping[str, Any]
"""Samples as stored: for the index of each part, uint8 of shape (samples, bytes)."""


class Leaf(NamedTuple):
    """A part of a sample, such as a tensor, that occupies contiguous memory.

    Attributes:
        kind: torch.Tensor, np.ndarray, NoneType, or the type of a number.
        dtype: torch's dtype for a tensor, otherwise numpy's.
        shape: shape of the part.
        strides: strides of the part, in elements for a tensor, otherwise in bytes.
        bytes: number of bytes.
    """

    kind: Any
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    bytes: int


class Form:
    """Common structure of equal samples: nested containers of tensors, arrays and numbers."""

    def __init__(self, spec: Any, leaves: list[Leaf]) -> None:
        self._spec = spec
        self._leaves = {str(at): leaf for at, leaf in enumerate(leaves)}
        self.layout = layout_of(self._zeros(0))
        self.bytes = max(1, self.layout.stride)

    def __reduce__(self) -> Any:
        # Any sample defines the form. It is sent as bytes, since torch would send a tensor's memory
        # by a file descriptor, which may be closed before the other process receives it.
        return _form_in, (pickle.dumps(self.samples(self._zeros(1))[0]),)

    def _zeros(self, count: int) -> Columns:
        return {at: np.zeros((count, leaf.bytes), np.uint8) for at, leaf in self._leaves.items()}

    def columns(self, sample: Any) -> Columns | None:
        """Return a sample's bytes, maybe without a copy; None if the sample has another form."""
        values, spec = pytree.tree_flatten(sample)
        leaves = [_leaf_of(value) for value in values]
        if spec != self._spec or leaves != [*self._leaves.values()]:
            return None
        return {str(at): _bytes_of(value)[None] for at, value in enumerate(values)}

    def samples(self, columns: Columns) -> list[Any]:
        """Return the samples with these bytes, as views of their memory."""
        parts = [_values(columns[at], leaf) for at, leaf in self._leaves.items()]
        return [pytree.tree_unflatten(values, self._spec) for values in zip(*parts, strict=True)]


def form_of(sample: Any) -> Form | None:
    """Return the form of a sample; None if it is empty or contains other types."""
    values, spec = pytree.tree_flatten(sample)
    leaves = [leaf for value in values if (leaf := _leaf_of(value)) is not None]
    return Form(spec, leaves) if leaves and len(leaves) == len(values) else None


def _form_in(sample: bytes) -> Form | None:
    return form_of(pickle.loads(sample))


def _leaf_of(value: Any) -> Leaf | None:
    kind = type(value)
    if kind is torch.Tensor:
        return _leaf_of_tensor(value)
    if kind is np.ndarray:
        in_memory = value.transpose(_order(value.strides))
        if value.dtype.hasobject or not in_memory.flags.c_contiguous:
            return None
        return Leaf(kind, value.dtype, value.shape, value.strides, value.nbytes)
    if value is None:
        return Leaf(kind, None, (), (), 0)
    if kind in (bool, float) or (kind is int and -(2**63) <= value < 2**63):
        return Leaf(kind, np.dtype(kind), (), (), np.dtype(kind).itemsize)
    if isinstance(value, (np.number, np.bool_)):
        return Leaf(kind, value.dtype, (), (), value.dtype.itemsize)
    return None


def _leaf_of_tensor(value: torch.Tensor) -> Leaf | None:
    # Tensors and arrays must fill contiguous memory, in any order of their axes.
    is_plain = value.layout is torch.strided and value.device.type == "cpu"
    if not is_plain or value.requires_grad or value.is_quantized:
        return None
    if value.is_conj() or value.is_neg():
        return None
    if not value.permute(_order(value.stride())).is_contiguous():
        return None
    return Leaf(torch.Tensor, value.dtype, tuple(value.shape), value.stride(), value.nbytes)


def _order(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _bytes_of(value: Any) -> Any:
    if value is None:
        return np.empty(0, np.uint8)
    if type(value) is torch.Tensor:
        return value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy()
    array = np.asarray(value)
    return array.transpose(_order(array.strides)).reshape(-1).view(np.uint8)


def _values(rows: Any, leaf: Leaf) -> Sequence[Any]:
    if leaf.dtype is None:
        return [None] * len(rows)
    shape = (len(rows), *leaf.shape)
    if leaf.kind is torch.Tensor:
        flat = torch.from_numpy(rows).reshape(-1).view(leaf.dtype)
        return flat.as_strided(shape, (len(flat) // len(rows), *leaf.strides)).unbind()
    array = np.ndarray(shape, leaf.dtype, rows, 0, (leaf.bytes, *leaf.strides))
    return list(array) if issubclass(leaf.kind, (np.ndarray, np.generic)) else array.tolist()


class Store:
    """Samples of one form, by index."""

    def __init__(self, form: Form, count: int) -> None:
        self._form = form
        self._rows = SharedRows(form.layout, count)
        self._buffers = Buffers()
        self._kept = 0
        self._is_full = False

    def has(self, numbers: Sequence[int]) -> list[bool]:
        """Return for each index whether its sample is kept."""
        return list(self._rows.has(np.array(numbers, np.int64)))

    def get(self, numbers: Sequence[int]) -> list[Any]:
        """Return copies of kept samples."""
        return self._form.samples(self._rows.get(np.array(numbers, np.int64), self._buffers))

    def keep(self, number: int, sample: Any) -> None:
        """Keep a sample if memory has room and the sample has the common form."""
        if self._is_full or not 0 <= number < len(self._rows.rows):
            return
        columns = self._form.columns(sample)
        if columns is not None:
            self._rows.put(np.array([number]), columns)
            self._kept += 1
            self._is_full = is_memory_short(self._kept)


def is_memory_short(kept: int) -> bool:
    """Return True if memory is nearly used up; checked only after many kept samples."""
    return kept % _LOOK_EVERY == 0 and available_bytes() < _RESERVE


def are_same(columns: Columns, other: Columns) -> bool:
    """Return True if two samples of one form have the same bytes."""
    return all(np.array_equal(columns[at], other[at]) for at in columns)
