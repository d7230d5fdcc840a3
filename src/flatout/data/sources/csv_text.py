"""Text of whole CSV rows to Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import csv

from flatout.data.block import Numbers
from flatout.data.decoder import Bytes
from flatout.data.sources.csv_split import Dialect


def read_text(
    text: Any,
    names: Sequence[str],
    dialect: Dialect,
    types: Mapping[str, pa.DataType],
    used: Sequence[str] = (),
    *,
    skip_invalid: bool = False,
) -> pa.Table:
    """Parse whole rows, in this thread.

    Args:
        text: their bytes.
        names: of the columns.
        dialect: how they are written.
        types: of some columns; those of others are inferred.
        used: the columns wanted; none means all.
        skip_invalid: leave out rows with another number of fields.
    """
    buffer = pa.py_buffer(text)
    quote: Any = dialect.quote or False
    return csv.read_csv(
        pa.BufferReader(buffer),
        # One block: a block's end would have to be searched for, and quotes followed twice.
        read_options=csv.ReadOptions(
            use_threads=False, block_size=buffer.size + 1, column_names=list(names)
        ),
        parse_options=csv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char=quote,
            newlines_in_values=bool(dialect.quote),
            invalid_row_handler=(lambda row: "skip") if skip_invalid else None,
        ),
        convert_options=csv.ConvertOptions(
            column_types=dict(types),
            include_columns=list(used),
            null_values=list(dialect.missing),
            strings_can_be_null=True,
        ),
    )


def in_one_piece(buffer: Bytes, starts: Numbers, ends: Numbers) -> Any:
    """The bytes of rows, with newlines between them; without a copy where they lie so."""
    gaps = starts[1:] - ends[:-1]
    # A gap of one or two bytes is a line's end; what else was left out is longer.
    if ((gaps == 1) | (gaps == 2)).all():
        return buffer[starts[0] : ends[-1]]
    view = buffer.data
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return b"\n".join([view[start:end] for start, end in pairs])
