"""Parquet files, and Arrow IPC files (Feather)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatout.data.files import Paths, find
from flatout.data.schema import Given
from flatout.data.sources.optional import require

if TYPE_CHECKING:
    from flatout.data.pipeline import Pipeline
    from flatout.data.sources.arrow_schema import Defaults, Names


def parquet(
    paths: Paths,
    *,
    target: Names = None,
    inputs: Names = None,
    weight: str | None = None,
    unused: Names = None,
    schema: Given | None = None,
    default: Defaults = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    stack: bool = False,
    allow_nan: bool | None = None,
) -> Pipeline:
    """Rows of Parquet files. Only the columns that are used are read.

    Without a schema, float64 and decimals become float32, integers that are a target become int64,
    other numbers stay. Lists become ragged columns, lists of a fixed size get a shape. Several
    inputs come as a dict of tensors by column.

    Args:
        paths: as `files.find` takes them.
        target: the target's column, or a list of them; None where there is none.
        inputs: the input's column, or a list of them; None means all that have no other role.
        weight: the column of sample weights.
        unused: columns to leave out.
        schema: a Schema, the path of one in TOML, or a dict; beside it, `target`, `inputs`,
            `weight` and `unused` change roles.
        default: what a missing value becomes, in all columns or by column; None makes a missing
            value an error. A missing list of any length becomes an empty one.
        categories: for columns of strings, their values in the order of the numbers that they
            become: `{"colour": ["red", "green"]}` makes int64 0 and 1. Others are errors.
        stack: put all numeric input columns (no lists, no categories) into one input, float32 of
            shape (columns,), which most models of tables want.
        allow_nan: let NaN and infinite values pass; None means the schema's option, else False.

    Raises:
        DataError: a file is damaged, changed, or has other columns; naming file, row group, column
            and row of a value that is missing or does not fit.
    """
    require("pyarrow", "tables", "Parquet")
    from flatout.data.pipeline import Pipeline
    from flatout.data.sources.arrow_schema import Wanted
    from flatout.data.sources.table_chunks import ParquetFile, table_chunks

    wanted = Wanted(target, inputs, weight, unused, default, categories or {}, stack)
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
    categories: Mapping[str, Sequence[Any]] | None = None,
    stack: bool = False,
    allow_nan: bool | None = None,
) -> Pipeline:
    """Rows of Arrow IPC files, which Feather's version 2 writes as well; else as `parquet`."""
    require("pyarrow", "tables", "Arrow")
    from flatout.data.pipeline import Pipeline
    from flatout.data.sources.arrow_schema import Wanted
    from flatout.data.sources.table_chunks import ArrowFile, table_chunks

    wanted = Wanted(target, inputs, weight, unused, default, categories or {}, stack)
    files = [ArrowFile(file) for file in find(paths)]
    return Pipeline(table_chunks("arrow", files, schema, wanted, allow_nan))
