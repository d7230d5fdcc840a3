"""Shards of Parquet, written by pyarrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from flatout.data.conversion.shards import CountedFile
from flatout.data.reading.block import Block, Ragged, Values
from flatout.data.reading.schema import Column, Schema


class ParquetWriter:
    """Follows `flatout.data.conversion.shards.Writer`. Values do not change.

    A piece becomes a row group. Row groups are small, since a reader decodes whole row groups.
    Columns with a shape become lists of a fixed size, ragged columns become lists.
    """

    piece_bytes = 16 << 20

    def __init__(self, schema: Schema) -> None:
        # Options state how text became numbers, but only numbers are written.
        self.schema = Schema(format="parquet", columns=schema.columns)
        self._arrow = pa.schema(
            [pa.field(column.name, _type(column), nullable=False) for column in schema.columns]
        )

    def encode(self, block: Block) -> Any:
        arrays = [
            _array(block.columns[column.name], _type(column)) for column in self.schema.columns
        ]
        return pa.Table.from_arrays(arrays, schema=self._arrow)

    def open(self, out: CountedFile) -> ParquetFile:
        return ParquetFile(out, self._arrow)


class ParquetFile:
    def __init__(self, out: CountedFile, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(
            out, schema, compression="zstd", write_page_checksum=True, use_dictionary=False
        )

    def write(self, encoded: Any) -> None:
        self._writer.write_table(encoded, row_group_size=max(1, len(encoded)))

    def close(self) -> None:
        self._writer.close()


def _type(column: Column) -> pa.DataType:
    type = pa.from_numpy_dtype(column.numpy_dtype)
    if column.ragged:
        return pa.list_(type)
    for size in reversed(column.shape):
        type = pa.list_(type, size)
    return type


def _array(values: Values, type: pa.DataType) -> pa.Array:
    if isinstance(values, Ragged):
        first, last = int(values.offsets[0]), int(values.offsets[-1])
        offsets = pa.array((values.offsets - first).astype(np.int32))
        flat = _flat(values.values[first:last], type.value_type)
        return pa.ListArray.from_arrays(offsets, flat, type=type)
    inner = type
    while pa.types.is_fixed_size_list(inner):
        inner = inner.value_type
    array = _flat(np.ascontiguousarray(values).reshape(-1), inner)
    return _nested(array, type)


def _nested(array: pa.Array, type: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(type):
        return array
    inside = _nested(array, type.value_type)
    return pa.FixedSizeListArray.from_arrays(inside, type=type)


def _flat(values: npt.NDArray[Any], type: pa.DataType) -> pa.Array:
    return pa.array(values, type=type)
