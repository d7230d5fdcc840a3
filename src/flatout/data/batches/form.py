"""Conversion of columns to a model's inputs and targets, and of samples for user functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatout.data.batches.batch import Batch, map_tensors
from flatout.data.batches.tensors import as_tensors, parts_of
from flatout.data.reading.block import Block, Ragged, Values, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Column, Role, Schema
from flatout.errors import DataError


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a batch.

    Attributes:
        column: the column that it is made of.
        pad: value that fills a ragged row up.
        is_lengths: True for the lengths of a ragged column's rows instead of their values.
    """

    column: str
    pad: int | float = 0
    is_lengths: bool = False


# A Leaf, or a tuple or dict of them; nesting is allowed.
Tree: TypeAlias = Any


class Form(NamedTuple):
    """Columns of inputs, targets and weights.

    Attributes:
        inputs: a Leaf, or a tuple or dict of them.
        targets: a structure like `inputs`, or None.
        weight: a Leaf, or None.
    """

    inputs: Tree
    targets: Tree
    weight: Leaf | None

    def describe(self) -> str:
        trees = zip(("inputs", "targets", "weight"), self, strict=True)
        return ", ".join(f"{name} {_words(tree)}" for name, tree in trees if tree is not None)

    def batch(self, block: Block, buffers: Buffers) -> Batch:
        """Return the block as tensors that share its memory; ragged columns are padded."""
        inputs, targets, weight = map_tensors(
            lambda leaf: _tensor(leaf, block, buffers), tuple(self)
        )
        return Batch(inputs, targets, weight, torch.from_numpy(block.numbers.copy()), len(block))

    def sample(self, block: Block, row: int) -> tuple[Any, ...]:
        """Return a row for a user's function: (inputs,), or (inputs, targets[, weight])."""
        inputs, targets, weight = (
            map_tensors(lambda leaf: _row(leaf, block, row), tree) for tree in self
        )
        if weight is not None:
            return inputs, targets, weight
        return (inputs,) if targets is None else (inputs, targets)


def form_of(schema: Schema) -> Form:
    inputs = _of_role(schema, "input")
    if inputs is None:
        names = ", ".join(column.name for column in schema.columns)
        raise DataError(f"no column has the role input: the columns are {names}")
    weights = schema.of_role("weight")
    if len(weights) > 1:
        names = ", ".join(column.name for column in weights)
        raise DataError(f"expected at most one column in the role weight, found {names}")
    return Form(inputs, _of_role(schema, "target"), Leaf(weights[0].name) if weights else None)


def _of_role(schema: Schema, role: Role) -> Tree:
    columns = schema.of_role(role)
    if not columns:
        return None
    if len(columns) == 1 and columns[0].lengths is None:
        return Leaf(columns[0].name, columns[0].pad)
    return dict(pair for column in columns for pair in _leaves(column))


def _leaves(column: Column) -> Iterator[tuple[str, Leaf]]:
    yield column.name, Leaf(column.name, column.pad)
    if column.lengths is not None:
        yield column.lengths, Leaf(column.name, is_lengths=True)


def columns_of(made: Sequence[Any], function: str) -> tuple[dict[str, Values], Form]:
    """Return the results of a user's function for some samples as columns, and their form."""
    if any(value is None for value in made):
        raise DataError(f"{function} gives None: expected x, (x, y) or (x, y, weight); return it")
    parts = [parts_of(value, function) for value in made]
    columns: dict[str, Values] = {}
    trees = []
    for at, name in enumerate(("inputs", "targets", "weight")):
        trees.append(_gather(name, [part[at] for part in parts], columns, function))
    inputs, targets, weight = trees
    return columns, Form(inputs, targets, weight)


def _gather(name: str, values: Sequence[Any], columns: dict[str, Values], function: str) -> Tree:
    first = values[0]
    kinds = {type(value) for value in values}
    if first is None and kinds == {type(None)}:
        return None
    if isinstance(first, Mapping):
        _same(name, [_keys(value) for value in values], function)
        return {
            key: _gather(f"{name}[{key!r}]", [value[key] for value in values], columns, function)
            for key in first
        }
    if isinstance(first, (tuple, list)):
        _same(name, [_length(value) for value in values], function)
        return tuple(
            _gather(f"{name}[{i}]", [value[i] for value in values], columns, function)
            for i in range(len(first))
        )
    columns[name] = _stack(name, [_array(name, value, function) for value in values], function)
    return Leaf(name)


class Unlike(DataError):
    """A sample that differs in structure from the first one, such as a dict that lacks a key.

    Attributes:
        place: position of the sample in the list of samples.
    """

    place = 0


def _keys(value: Any) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, Mapping) else type(value).__name__


def _length(value: Any) -> str:
    is_tuple = isinstance(value, (tuple, list))
    return f"{len(value)} parts" if is_tuple else type(value).__name__


def _same(name: str, structures: Sequence[str], function: str) -> None:
    for place, found in enumerate(structures):
        if found != structures[0]:
            error = Unlike(
                f"{name}: the samples that {function} makes differ in structure: expected "
                f"{structures[0]}, as in the first one; found {found}"
            )
            error.place = place
            raise error


def _array(name: str, value: Any, function: str) -> npt.NDArray[Any]:
    if isinstance(value, (bool, int, float)):
        return np.asarray(value, dtype=np.float32 if isinstance(value, float) else None)
    tensor = as_tensors(name, value, function)
    assert isinstance(tensor, Tensor)
    if tensor.dtype == torch.bfloat16:
        raise DataError(f"{name}: expected a dtype that numpy has, found bfloat16", where=function)
    return tensor.detach().cpu().numpy()


def _stack(name: str, arrays: Sequence[npt.NDArray[Any]], function: str) -> Values:
    shapes = {array.shape for array in arrays}
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) > 1:
        words = " and ".join(sorted(str(dtype) for dtype in dtypes))
        raise DataError(f"{name}: {function} makes samples of dtypes {words}")
    if len(shapes) == 1:
        return np.stack(arrays)
    if any(len(shape) != 1 for shape in shapes):
        words = " and ".join(str(shape) for shape in sorted(shapes)[:2])
        raise DataError(
            f"{name}: {function} makes samples of shapes {words}",
            do="give all samples one shape; only vectors may differ in length",
        )
    return Ragged(np.concatenate(arrays), offsets_of([len(array) for array in arrays]))


def _words(tree: Tree) -> str:
    if isinstance(tree, Leaf):
        return tree.column
    parts = tree.values() if isinstance(tree, dict) else tree or ()
    return f"({', '.join(map(_words, parts))})"


def _tensor(leaf: Leaf, block: Block, buffers: Buffers) -> Tensor:
    values = block.columns[leaf.column]
    if leaf.is_lengths:
        assert isinstance(values, Ragged)
        return torch.from_numpy(np.diff(values.offsets))
    if isinstance(values, Ragged):
        return torch.from_numpy(padded(values, leaf.pad, buffers))
    return torch.from_numpy(values)


def padded(values: Ragged, pad: int | float, buffers: Buffers) -> npt.NDArray[Any]:
    """Return ragged rows as an array of shape (rows, longest row), at least 1 wide."""
    lengths = np.diff(values.offsets)
    width = max(1, int(lengths.max(initial=0)))
    out = buffers.empty((len(lengths), width), values.values.dtype)
    if len(lengths) * width == len(values.values):
        out[:] = values.values.reshape(out.shape)
        return out
    out.fill(pad)
    out[np.arange(width) < lengths[:, None]] = values.values[values.offsets[0] : values.offsets[-1]]
    return out


def _row(leaf: Leaf, block: Block, row: int) -> Tensor:
    values = block.columns[leaf.column]
    if not isinstance(values, Ragged):
        return torch.from_numpy(values[row : row + 1]).squeeze(0)
    start, stop = values.offsets[row : row + 2]
    return (
        torch.tensor(stop - start)
        if leaf.is_lengths
        else torch.from_numpy(values.values[start:stop])
    )
