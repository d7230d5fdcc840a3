"""Samples of one form, packed into memory that all processes of a loader share."""

from __future__ import annotations

import mmap
import os
import pickle
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch.utils import _pytree as pytree

from flatout.measure.meters import available_bytes

# After so many samples that a process has kept it looks whether so much memory is still free.
_LOOK_EVERY, _RESERVE = 256, 512 * 2**20
_ALIGNED = 16


class Leaf(NamedTuple):
    """A part of a sample: what it is, and where its bytes lie.

    Attributes:
        kind: torch.Tensor, np.ndarray, NoneType, or the type of a number.
        dtype: of torch for a tensor, else of numpy.
        shape, strides: strides in elements for a tensor, else in bytes.
        at, bytes: its place.
    """

    kind: Any
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    at: int
    bytes: int


class Form:
    """How samples look that are all alike: nested containers of tensors, arrays and numbers."""

    def __init__(self, spec: Any, leaves: list[Leaf]) -> None:
        self.spec = spec
        self.leaves = leaves
        self.bytes = max((_aligned(leaf.at + leaf.bytes) for leaf in leaves), default=0)
        self.bytes = max(_ALIGNED, self.bytes)

    def __reduce__(self) -> Any:
        # Any sample has it. As bytes: torch would send a tensor's memory by a descriptor, which is
        # closed with the tensor before the other process has it.
        return _form_in, (pickle.dumps(self.unpack(np.zeros(self.bytes, np.uint8))),)

    def packed(self, sample: Any) -> Any:
        """A row with the bytes of a sample; None where it is of another form."""
        row = np.zeros(self.bytes, np.uint8)
        return row if self.pack(sample, row) else None

    def pack(self, sample: Any, row: Any) -> bool:
        """Writes a sample into a row of bytes; False where it is of another form."""
        values, spec = pytree.tree_flatten(sample)
        if spec != self.spec:
            return False
        for leaf, value in zip(self.leaves, values, strict=True):
            if _leaf_of(value, leaf.at) != leaf:
                return False
        for leaf, value in zip(self.leaves, values, strict=True):
            if leaf.kind is torch.Tensor:
                _tensor_in(row, leaf).copy_(value)
            elif leaf.bytes:
                _array_in(row, leaf)[...] = value
        return True

    def unpack(self, row: Any) -> Any:
        """A new sample, as it was packed."""
        return pytree.tree_unflatten([_unpacked(row, leaf) for leaf in self.leaves], self.spec)


def form_of(sample: Any) -> Form | None:
    """The form of a sample; None where it holds anything else."""
    values, spec = pytree.tree_flatten(sample)
    leaves: list[Leaf] = []
    at = 0
    for value in values:
        leaf = _leaf_of(value, at)
        if leaf is None:
            return None
        leaves.append(leaf)
        at = _aligned(at + leaf.bytes)
    return Form(spec, leaves)


def _form_in(sample: bytes) -> Form | None:
    return form_of(pickle.loads(sample))


def _leaf_of(value: Any, at: int) -> Leaf | None:
    kind = type(value)
    if kind is torch.Tensor:
        return _leaf_of_tensor(value, at)
    if kind is np.ndarray:
        return _leaf_of_array(value, at)
    if value is None:
        return Leaf(kind, None, (), (), at, 0)
    if kind in (bool, float) or (kind is int and -(2**63) <= value < 2**63):
        return Leaf(kind, np.dtype(kind), (), (), at, np.dtype(kind).itemsize)
    if isinstance(value, (np.number, np.bool_)):
        return Leaf(kind, value.dtype, (), (), at, value.dtype.itemsize)
    return None


def _leaf_of_tensor(value: torch.Tensor, at: int) -> Leaf | None:
    # In one piece, in whatever order of its axes; so are arrays.
    is_plain = value.layout is torch.strided and value.device.type == "cpu"
    if not is_plain or value.requires_grad or value.is_quantized or value.is_conj():
        return None
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    if not value.permute(order).is_contiguous():
        return None
    size = value.numel() * value.element_size()
    return Leaf(torch.Tensor, value.dtype, tuple(value.shape), strides, at, size)


def _leaf_of_array(value: Any, at: int) -> Leaf | None:
    order = sorted(range(value.ndim), key=lambda axis: -value.strides[axis])
    if value.dtype.hasobject or not value.transpose(order).flags.c_contiguous:
        return None
    return Leaf(np.ndarray, value.dtype, value.shape, value.strides, at, value.nbytes)


def _tensor_in(row: Any, leaf: Leaf) -> torch.Tensor:
    whole = torch.from_numpy(row[leaf.at : leaf.at + leaf.bytes])
    return whole.view(leaf.dtype).as_strided(leaf.shape, leaf.strides)


def _array_in(row: Any, leaf: Leaf) -> Any:
    return np.ndarray(leaf.shape, leaf.dtype, row.data, leaf.at, leaf.strides or None)


def _unpacked(row: Any, leaf: Leaf) -> Any:
    if leaf.kind is torch.Tensor:
        made = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype)
        return made.copy_(_tensor_in(row, leaf))
    if leaf.kind is np.ndarray:
        return _array_in(row, leaf).copy(order="K")
    if not leaf.bytes:
        return None
    number = _array_in(row, leaf)[()]
    return number if issubclass(leaf.kind, np.generic) else leaf.kind(number)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Store:
    """Rows of one form by number, in an anonymous file that workers share, however they start.

    Only rows that were kept take memory.

    Args:
        form: of the samples.
        count: rows 0 to count - 1 can be kept.
        owner: process and file descriptor of the one that has made it; None makes it.
    """

    def __init__(self, form: Form, count: int, owner: tuple[int, int] | None = None) -> None:
        self._form = form
        self._count = count
        self._kept = 0
        self._is_full = False
        size = count * (form.bytes + 1)
        if owner is None:
            file = os.memfd_create("flatout-samples", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
            owner = (os.getpid(), file)
        else:
            file = os.open(f"/proc/{owner[0]}/fd/{owner[1]}", os.O_RDWR | os.O_CLOEXEC)
        finalize(self, os.close, file)
        self._owner = owner
        bytes_ = np.frombuffer(mmap.mmap(file, size), np.uint8)
        self._rows = bytes_[: count * form.bytes].reshape(count, form.bytes)
        self._there = bytes_[count * form.bytes :]

    def __reduce__(self) -> Any:
        return Store, (self._form, self._count, self._owner)

    def has(self, number: int) -> bool:
        """Whether this sample is kept."""
        return 0 <= number < self._count and bool(self._there[number])

    def get(self, number: int) -> Any:
        """A sample that is kept, as a copy."""
        return self._form.unpack(self._rows[number])

    def keep(self, number: int, sample: Any) -> None:
        """Keeps a sample, while memory has room and where it is of the form of the others."""
        if self._is_full or not 0 <= number < self._count:
            return
        if self._form.pack(sample, self._rows[number]):
            self._there[number] = 1
            self._kept += 1
            self._is_full = is_memory_short(self._kept)


def is_memory_short(kept: int) -> bool:
    """Whether memory is nearly used up; looked at once in many samples that were kept."""
    return kept % _LOOK_EVERY == 0 and available_bytes() < _RESERVE
