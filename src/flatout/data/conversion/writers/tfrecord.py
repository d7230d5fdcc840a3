"""Shards of tf.train.Example records."""

from __future__ import annotations

from typing import Any

import numpy as np

from flatout.data.conversion.shards import CountedFile
from flatout.data.reading.block import Block, Ragged, Values
from flatout.data.reading.schema import Column, Schema
from flatout.errors import DataError
from flatout.kernels import example

# dtype in an Example, which holds int64, float32 and bytes, for each dtype that is stored exactly.
_STORED = {
    "bool": "int64",
    "int8": "int64",
    "int16": "int64",
    "int32": "int64",
    "int64": "int64",
    "uint8": "uint8",
    "float16": "float32",
    "float32": "float32",
}
# dtype of the stored column in the schema that reads it.
_READ = {**_STORED, "int32": "int32"}


class TfrecordWriter:
    """Follows `flatout.data.conversion.shards.Writer`.

    uint8 vectors and arrays become the bytes of one value; single numbers of uint8, and all other
    integers, become int64 lists; float16 becomes float32.
    """

    piece_bytes = 4 << 20

    def __init__(self, schema: Schema) -> None:
        for column in schema.columns:
            if column.dtype not in _STORED:
                raise DataError(
                    f"column {column.name!r}: Examples hold float32, and {column.dtype} would lose "
                    "digits",
                    do="read it as float32 (dtype in the schema), or convert to Parquet or rows",
                )
        self._stored = {column.name: _stored(column) for column in schema.columns}
        columns = [column.model_copy(update={"dtype": _read(column)}) for column in schema.columns]
        self.schema = Schema(format="tfrecord", columns=tuple(columns), options=schema.options)

    def encode(self, block: Block) -> Any:
        columns = {name: _as(values, self._stored[name]) for name, values in block.columns.items()}
        records, _ = example.encode(columns)
        return records

    def open(self, out: CountedFile) -> CountedFile:
        """Return the file itself: a shard has no end mark."""
        return out


def _stored(column: Column) -> np.dtype[Any]:
    is_number = column.shape == () and not column.ragged
    return np.dtype("int64" if column.dtype == "uint8" and is_number else _STORED[column.dtype])


def _read(column: Column) -> str:
    is_number = column.shape == () and not column.ragged
    return "int64" if column.dtype == "uint8" and is_number else _READ[column.dtype]


def _as(values: Values, dtype: np.dtype[Any]) -> Values:
    if isinstance(values, Ragged):
        return Ragged(np.ascontiguousarray(values.values, dtype), values.offsets)
    return np.ascontiguousarray(values, dtype)
