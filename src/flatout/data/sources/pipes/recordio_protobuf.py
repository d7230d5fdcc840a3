"""Amazon SageMaker's Record: a message of named tensors. RecordIO files hold one Record per row.

    message Record { map<string, Value> features = 1; map<string, Value> label = 2; }
    message Value { oneof { Float32Tensor = 2; Float64Tensor = 3; Int32Tensor = 7; Bytes = 9; } }
    message ...Tensor { repeated values = 1; repeated uint64 keys = 2; repeated uint64 shape = 3; }
    message Bytes { repeated bytes value = 1; }

The wire format is that of Protocol Buffers (https://protobuf.dev/programming-guides/encoding). A
sparse tensor has the position of each value in `keys`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Block, Numbers, Ragged, Values, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.decoder import Bytes, Encoded, Lengths, Split
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.schema import Column, Schema
from flatout.data.sources.pipes.framing import split_recordio
from flatout.data.sources.records.protobuf import WireError, fields, message

# Field numbers of a Record.
_FEATURES, _LABEL = 1, 2
_FLOAT32, _FLOAT64, _INT32, _BYTES = 2, 3, 7, 9
_KINDS = {_FLOAT32: "float32", _FLOAT64: "float64", _INT32: "int32", _BYTES: "bytes"}
# Name of the only tensor in Records of SageMaker's own writers and algorithms.
_DEFAULT_KEY = "values"


class Tensor(NamedTuple):
    """A Value of a Record.

    Attributes:
        kind: "float32", "float64", "int32" or "bytes".
        values: of shape (n,); uint8 if the kind is bytes.
        keys: positions of the values in a sparse tensor, int64; empty for a dense tensor.
        shape: shape of the tensor, int64; empty if it was left out.
    """

    kind: str
    values: npt.NDArray[Any]
    keys: Numbers
    shape: Numbers


class _Bad(Exception):
    """An error in a record."""


class RecordioDecoder:
    """Decoder of RecordIO records that each hold a Record.

    A column is the feature of its name. The column `label` is the label "values", as SageMaker's
    algorithms have it, and `label.NAME` is another label. `NAME.keys` are the positions of a sparse
    feature's values. A sparse feature becomes dense in a column with a shape; in a ragged column it
    stays sparse. A missing feature without a default is an error.
    """

    text = False

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._sources = [_Source.of(column) for column in schema.columns]

    def split(self, buffer: Bytes, final: bool) -> Split:
        return split_recordio(buffer, final)

    def decode(
        self, rows: Encoded, lengths: Lengths, buffers: Buffers, policy: ErrorPolicy
    ) -> Block:
        good: list[int] = []
        values: list[list[npt.NDArray[Any]]] = []
        pairs = zip(rows.starts.tolist(), rows.ends.tolist(), strict=True)
        for row, (start, end) in enumerate(pairs):
            try:
                maps = read_record(rows.buffer[start:end].tobytes())
                values.append([source.values(maps) for source in self._sources])
                good.append(row)
            except _Bad as bad:
                policy.bad(str(bad), rows.where(row, start))
            except WireError as error:
                policy.bad(f"no Record: {error}", rows.where(row, start))
        columns: dict[str, Values] = {}
        for at, column in enumerate(self.schema.columns):
            columns[column.name] = _put_together(column, [row[at] for row in values], buffers)
        return Block(columns, rows.numbers[np.array(good, np.int64)])


def _put_together(column: Column, rows: Sequence[npt.NDArray[Any]], buffers: Buffers) -> Values:
    sizes = offsets_of([len(row) for row in rows])
    flat = buffers.empty(int(sizes[-1]), column.numpy_dtype)
    if rows:
        np.concatenate(rows, out=flat)
    return Ragged(flat, sizes) if column.ragged else flat.reshape(len(rows), *column.shape)


class _Source(NamedTuple):
    """Position of a column's values in a Record."""

    column: Column
    map: int
    key: str
    of_keys: bool

    @classmethod
    def of(cls, column: Column) -> _Source:
        name = column.name
        if name == "label":
            return cls(column, _LABEL, _DEFAULT_KEY, False)
        if name.startswith("label."):
            return cls(column, _LABEL, name.removeprefix("label."), False)
        if name.endswith(".keys"):
            return cls(column, _FEATURES, name.removesuffix(".keys"), True)
        return cls(column, _FEATURES, name, False)

    @property
    def width(self) -> int:
        return math.prod(self.column.shape)

    def values(self, maps: Mapping[int, Mapping[str, Tensor]]) -> npt.NDArray[Any]:
        tensor = maps[self.map].get(self.key)
        if tensor is None:
            return self._default(maps[self.map])
        result = tensor.keys if self.of_keys else self._laid_out(tensor)
        if not self.column.ragged and len(result) != self.width:
            raise _Bad(f"{self.words}: expected {self.width} values, found {len(result)}")
        return self._as_dtype(result)

    @property
    def words(self) -> str:
        return f"{'label' if self.map == _LABEL else 'feature'} {self.key!r}"

    def _default(self, present: Mapping[str, Tensor]) -> npt.NDArray[Any]:
        if self.column.default is None:
            names = ", ".join(map(repr, present)) or "none"
            raise _Bad(f"expected {self.words}, found {names}")
        width = 0 if self.column.ragged else self.width
        return np.full(width, self.column.default, self.column.numpy_dtype)

    def _laid_out(self, tensor: Tensor) -> npt.NDArray[Any]:
        size = math.prod(tensor.shape.tolist()) if len(tensor.shape) else None
        sparse = len(tensor.keys) > 0 or (size and not len(tensor.values))
        if not sparse:
            if size is not None and size != len(tensor.values):
                raise _Bad(
                    f"{self.words}: expected {size} values by its shape, found {len(tensor.values)}"
                )
            return tensor.values
        if len(tensor.keys) != len(tensor.values):
            raise _Bad(f"{self.words}: {len(tensor.values)} values have {len(tensor.keys)} keys")
        if self.column.ragged:
            return tensor.values
        if size is not None and size != self.width:
            raise _Bad(f"{self.words}: expected a tensor of {self.width} values, found {size}")
        largest = int(tensor.keys.view(np.uint64).max(initial=0))
        if largest >= self.width:
            raise _Bad(f"{self.words}: expected keys from 0 to {self.width - 1}, found {largest}")
        dense = np.zeros(self.width, tensor.values.dtype)
        dense[tensor.keys] = tensor.values
        return dense

    def _as_dtype(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        dtype = self.column.numpy_dtype
        with np.errstate(invalid="ignore", over="ignore"):
            cast = values.astype(dtype)
        lost = cast != values if dtype.kind != "f" else np.isfinite(values) & ~np.isfinite(cast)
        if lost.any():
            raise _Bad(f"{self.words}: expected {dtype.name}, found {values[lost][0]}")
        return cast


# ---- the message ----


def read_record(record: bytes) -> dict[int, dict[str, Tensor]]:
    maps: dict[int, dict[str, Tensor]] = {_FEATURES: {}, _LABEL: {}}
    for number, entry in fields(record):
        if number not in maps:
            continue
        name, tensor = "", None
        for part, content in fields(entry):
            if part == 1:
                name = message(content).decode(errors="replace")
            elif part == 2:
                tensor = _read_value(content)
        if tensor is not None:
            maps[number][name] = tensor
    return maps


def _read_value(value: int | bytes) -> Tensor | None:
    tensor = None
    for number, content in fields(value):
        if number == _BYTES:
            messages = [message(part) for key, part in fields(content) if key == 1]
            values = np.frombuffer(messages[-1] if messages else b"", np.uint8)
            tensor = Tensor("bytes", values, _NONE, _NONE)
        elif number in _KINDS:
            tensor = _read_tensor(content, _KINDS[number])
    return tensor


def _read_tensor(content: int | bytes, kind: str) -> Tensor:
    parts: dict[int, list[npt.NDArray[Any]]] = {1: [], 2: [], 3: []}
    for number, data in fields(content):
        if number not in parts:
            continue
        if number == 1 and kind != "int32":
            parts[1].append(_floats(data, kind))
        else:
            parts[number].append(_integers(data))
    values = _all(parts[1], np.dtype(kind))
    return Tensor(kind, values, _all(parts[2], _INT64), _all(parts[3], _INT64))


_INT64 = np.dtype(np.int64)
_NONE: Numbers = np.empty(0, np.int64)


def _all(parts: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if len(parts) == 1:
        return parts[0].astype(dtype, copy=False)
    return np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype)


def _floats(data: int | bytes, kind: str) -> npt.NDArray[Any]:
    dtype = np.dtype(kind).newbyteorder("<")
    if isinstance(data, int) or len(data) % dtype.itemsize:
        raise WireError(f"expected packed {kind} values")
    return np.frombuffer(data, dtype)


def _integers(data: int | bytes) -> Numbers:
    if isinstance(data, int):
        return np.array([data], np.uint64).view(np.int64)
    raw = np.frombuffer(data, np.uint8)
    is_last = raw < 128
    if not len(raw) or is_last.all():
        return raw.astype(np.int64)
    if not is_last[-1]:
        raise WireError("packed values end within one")
    ends = np.flatnonzero(is_last) + 1
    starts = np.concatenate([[0], ends[:-1]])
    places = np.arange(len(raw)) - np.repeat(starts, ends - starts)
    if int(places.max()) > 9:
        raise WireError("a varint of more than ten bytes")
    bits = (raw & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    sums: npt.NDArray[np.uint64] = np.add.reduceat(bits, starts)
    return sums.view(np.int64)
