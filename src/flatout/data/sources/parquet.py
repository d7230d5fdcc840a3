"""Parquet files, and Arrow IPC files (Feather)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.data.files import Paths, find
from flatout.data.pipeline import Pipeline
from flatout.data.schema import Given
from flatout.data.sources.optional import require

if TYPE_CHECKING:
    from flatout.data.sources.arrow_schema import Categories, Dates, Defaults, Names


def parquet(
    paths: Paths,
    *,
    target: Names = None,
    inputs: Names = None,
    weight: str | None = None,
    unused: Names = None,
    schema: Given | None = None,
    default: Defaults = None,
    categories: Categories = None,
    dates: Dates = None,
    stack: bool = False,
    skip_text: bool = False,
    allow_nan: bool | None = None,
) -> Pipeline:
    """Rows of Parquet files. Only the columns that are used are read.

    Without a schema, float64 and decimals become float32, integers that are a target become int64,
    other numbers stay. Lists become ragged columns, lists of a fixed size get a shape. Several
    inputs come as a dict of tensors by column.

    Args:
        paths: as `files.find` takes them.
        target: as `csv`, like `inputs`, `weight`, `schema`, `categories` and `skip_text`.
        unused: columns to leave out.
        default: what a missing value becomes, in all columns or by column; None makes a missing
            value an error. A missing list of any length becomes an empty one.
        dates: columns of dates, or how those of each are written: `{"day": "%d.%m.%Y"}`. They
            become days since 1970-01-01, float32. Columns of Arrow's own dates need no naming.
        stack: put all numeric input columns (no lists, no categories) into one input, float32 of
            shape (columns,), which most models of tables want.
        allow_nan: let NaN and infinite values pass; None means the schema's option, else False.

    Raises:
        DataError: a file is damaged, changed, or has other columns; naming file, row group, column
            and row of a value that is missing or does not fit.
    """
    require("pyarrow", "tables", "Parquet")
    from flatout.data.sources.arrow_schema import ColumnOptions
    from flatout.data.sources.table_chunks import ParquetFile, table_chunks

    wanted = ColumnOptions(
        target, inputs, weight, unused, default, categories, stack, dates, leave_out=skip_text
    )
    files = [ParquetFile(file) for file in find(paths)]
    return Pipeline(table_chunks("parquet", files, schema, wanted, allow_nan))


def arrow(
    paths: Paths,
    *,
    target: Names = None,
    inputs: Names = None,
    weight: str | None = None,
    unused: Names = None,
    schema: Given | None = None,
    default: Defaults = None,
    categories: Categories = None,
    dates: Dates = None,
    stack: bool = False,
    skip_text: bool = False,
    allow_nan: bool | None = None,
) -> Pipeline:
    """Rows of Arrow IPC files, which Feather's version 2 writes as well; else as `parquet`."""
    require("pyarrow", "tables", "Arrow")
    from flatout.data.sources.arrow_schema import ColumnOptions
    from flatout.data.sources.table_chunks import ArrowFile, table_chunks

    wanted = ColumnOptions(
        target, inputs, weight, unused, default, categories, stack, dates, leave_out=skip_text
    )
    files = [ArrowFile(file) for file in find(paths)]
    return Pipeline(table_chunks("arrow", files, schema, wanted, allow_nan))
