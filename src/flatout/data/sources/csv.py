"""CSV and TSV files: a header, then a row a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.data.error_policy import ErrorPolicy, OnError
from flatout.data.files import Paths, find
from flatout.data.pipeline import Pipeline
from flatout.data.schema import Given
from flatout.data.sources.optional import require

if TYPE_CHECKING:
    from flatout.data.sources.arrow_schema import Categories, Dates, Defaults, Names


def csv(
    paths: Paths,
    *,
    target: Names = None,
    inputs: Names = None,
    weight: str | None = None,
    unused: Names = None,
    schema: Given | None = None,
    delimiter: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
    header: bool | Sequence[str] | None = None,
    quote: str | None = None,
    missing: Sequence[str] | None = None,
    default: Defaults = None,
    categories: Categories = None,
    dates: Dates = None,
    stack: bool = False,
    skip_text: bool = False,
    allow_nan: bool | None = None,
    on_error: OnError = "fail",
    max_errors: int = 100,
) -> Pipeline:
    """Rows of CSV or TSV files, packed or not.

    Without a schema, the columns' types are inferred from the first mebibyte of the first file and
    of the last: whole numbers become int64, others float32, true and false bool. Several inputs
    come as a dict of tensors by column. Blank lines are no rows.

    What None means below is what the schema's option of that name says, or else what is named.
    What is found out and is no matter of course stands in the pipeline's notes.

    Args:
        paths: as `files.find` takes them. All have the same columns.
        target: the target's column, or a list of them; None where there is none.
        inputs: the input's column, or a list of them; None means all that have no other role.
        weight: the column of sample weights.
        unused: columns to leave out. Columns without a name, as pandas writes its index, are left
            out without being asked for.
        schema: a Schema, the path of one in TOML, or a dict; beside it, `target`, `inputs`,
            `weight` and `unused` change roles.
        delimiter: between fields; None: a tab for files that end in .tsv or .tab, else tab,
            semicolon, bar or comma, whichever parts the first rows alike.
        decimal: between a number's whole part and its fraction; None: a comma where the delimiter
            is none and no number of the first rows has a point, else a point.
        encoding: as Python calls it, such as "cp1252"; a file that is not UTF-8 is copied into the
            cache folder as UTF-8, once. None: what a byte order mark says, else UTF-8.
        header: whether the first line of each file names the columns; or the names, for files
            without such a line. False calls them f0, f1, ...; None: True, unless numbers stand in
            it above numbers.
        quote: around fields that hold delimiters or newlines; "" where quotes mean nothing; None:
            a double quote.
        missing: texts that stand for a missing value; None: "", NA, N/A, n/a, #N/A, <NA>,
            NULL, null, None.
        default: what a missing value becomes, in all columns or by column; None makes a missing
            value an error.
        categories: columns whose texts become numbers, with the texts in the order of these
            numbers: `{"color": ["red", "green"]}` makes int64 0 and 1, and others are errors. A
            list of names, or None in place of the texts, learns them from all rows: the sorted
            texts count from 1, 0 stands for any other and for a missing one (of a target they count
            from 0, and others are errors). Columns of text whose values come again are learned
            without being named, those that hold names or prose are refused.
        dates: columns of dates, or how those of each are written: `{"day": "%d.%m.%Y"}`. They
            become days since 1970-01-01, float32. ISO 8601 is found without being named.
        stack: put all numeric input columns (no categories) into one input, float32 of shape
            (columns,), which most models of tables want.
        skip_text: leave out columns of text that are no categories, instead of refusing them.
        allow_nan: let NaN and infinite values pass; None: False.
        on_error: "fail", or "skip" rows that are not as they should be: another number of fields,
            text in a column of numbers, missing and unknown values.
        max_errors: the most rows to skip.

    Raises:
        DataError: file and line of what is wrong, what was expected and found.
    """
    require("pyarrow", "tables", "CSV")
    from flatout.data.sources.arrow_schema import ColumnOptions, listed
    from flatout.data.sources.csv_rows import csv_rows

    wanted = ColumnOptions(
        target, inputs, weight, unused, default, categories, stack, dates, leave_out=skip_text
    )
    return Pipeline(
        csv_rows(
            find(paths),
            wanted,
            ErrorPolicy(on_error, max_errors),
            schema,
            delimiter=delimiter,
            decimal=decimal,
            encoding=encoding,
            header=header,
            quote=quote,
            missing=None if missing is None else listed(missing),
            allow_nan=allow_nan,
        )
    )
