"""Parquet files, and Arrow IPC files (Feather)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.data.pipeline import Pipeline
from flatout.data.reading.files import Paths, find
from flatout.data.reading.schema import Given
from flatout.data.sources.optional import require

if TYPE_CHECKING:
    from flatout.data.sources.arrow.arrow_schema import Categories, Dates, Defaults, Names


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
    """Read rows of Parquet files. Only columns that are used are read.

    Without a schema, float64 and decimals become float32, integer targets become int64, and other
    numbers do not change. Lists become ragged columns, lists of a fixed size get a shape. Several
    inputs are a dict of tensors by column.

    Args:
        paths: path, glob pattern or URL, or a list of these.
        target: column of the target, or a list of columns, as for `csv`. The arguments `inputs`,
            `weight`, `schema`, `categories` and `skip_text` are also as for `csv`.
        unused: columns to leave out.
        default: value that replaces a missing value, in all columns or by column; None makes a
            missing value an error. A missing list of any length becomes an empty one.
        dates: columns of dates, or the format of each: `{"day": "%d.%m.%Y"}`. They become days
            since 1970-01-01, float32. Columns of Arrow's own date types are always converted.
        stack: put all numeric input columns (no lists, no categories) into one input, float32 of
            shape (columns,), which most models of tables need.
        allow_nan: accept NaN and infinite values; None means the schema's option, else False.

    Raises:
        DataError: a file is damaged, changed, or has other columns. For a missing or unfit value,
            it names file, row group, column and row.
    """
    require("pyarrow", "tables", "Parquet")
    from flatout.data.sources.arrow.arrow_schema import ColumnOptions
    from flatout.data.sources.arrow.table_chunks import ParquetFile, table_chunks

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
    """Read rows of Arrow IPC files, also from Feather version 2; arguments as for `parquet`."""
    require("pyarrow", "tables", "Arrow")
    from flatout.data.sources.arrow.arrow_schema import ColumnOptions
    from flatout.data.sources.arrow.table_chunks import ArrowFile, table_chunks

    wanted = ColumnOptions(
        target, inputs, weight, unused, default, categories, stack, dates, leave_out=skip_text
    )
    files = [ArrowFile(file) for file in find(paths)]
    return Pipeline(table_chunks("arrow", files, schema, wanted, allow_nan))
