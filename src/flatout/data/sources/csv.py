"""CSV and TSV files: a header, then a row a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatout.data.faults import Faults, OnError
from flatout.data.files import Paths, find
from flatout.data.schema import Given
from flatout.data.sources.optional import require

if TYPE_CHECKING:
    from flatout.data.pipeline import Pipeline
    from flatout.data.sources.arrow_schema import Defaults, Names


def csv(
    paths: Paths,
    *,
    target: Names = None,
    inputs: Names = None,
    weight: str | None = None,
    unused: Names = None,
    schema: Given | None = None,
    delimiter: str | None = None,
    header: bool | Sequence[str] | None = None,
    quote: str | None = None,
    missing: Sequence[str] | None = None,
    default: Defaults = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    stack: bool = False,
    allow_nan: bool | None = None,
    on_error: OnError = "fail",
    max_errors: int = 100,
) -> Pipeline:
    """Rows of CSV or TSV files in UTF-8, packed or not.

    Without a schema, the columns' types are inferred from the first mebibyte of the first file and
    of the last: whole numbers become int64, others float32, true and false bool. Several inputs
    come as a dict of tensors by column. Blank lines are no rows.

    What None means below is what the schema's option of that name says, or else what is named.

    Args:
        paths: as `files.find` takes them. All have the same columns.
        target: the target's column, or a list of them; None where there is none.
        inputs: the input's column, or a list of them; None means all that have no other role.
        weight: the column of sample weights.
        unused: columns to leave out. Columns without a name, as pandas writes its index, are left
            out without being asked for.
        schema: a Schema, the path of one in TOML, or a dict; beside it, `target`, `inputs`,
            `weight` and `unused` change roles.
        delimiter: between fields; None: a tab for files that end in .tsv or .tab, else a comma.
        header: whether the first line of each file names the columns; or the names, for files
            without such a line. False calls them f0, f1, ...; None: True.
        quote: around fields that hold delimiters or newlines; "" where quotes mean nothing; None:
            a double quote.
        missing: texts that stand for a missing value; None: "", NA, N/A, #N/A, NULL, null, None.
        default: what a missing value becomes, in all columns or by column; None makes a missing
            value an error.
        categories: for columns of strings, their values in the order of the numbers that they
            become: `{"colour": ["red", "green"]}` makes int64 0 and 1. Others are errors.
        stack: put all numeric input columns (no categories) into one input, float32 of shape
            (columns,), which most models of tables want.
        allow_nan: let NaN and infinite values pass; None: False.
        on_error: "fail", or "skip" rows that are not as they should be: another number of fields,
            text in a column of numbers, missing and unknown values.
        max_errors: the most rows to skip.

    Raises:
        DataError: file and line of what is wrong, what was expected and found.
    """
    require("pyarrow", "tables", "CSV")
    from flatout.data.pipeline import Pipeline
    from flatout.data.sources.arrow_schema import Wanted, listed
    from flatout.data.sources.csv_decoder import csv_rows

    wanted = Wanted(target, inputs, weight, unused, default, categories or {}, stack)
    return Pipeline(
        csv_rows(
            find(paths),
            wanted,
            Faults(on_error, max_errors),
            schema,
            delimiter=delimiter,
            header=header,
            quote=quote,
            missing=None if missing is None else listed(missing),
            allow_nan=allow_nan,
        )
    )
