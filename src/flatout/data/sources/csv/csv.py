"""CSV and TSV files: a header, then one row per line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.data.pipeline import Pipeline
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import Paths, find
from flatout.data.reading.schema import Given
from flatout.data.sources.optional import require

if TYPE_CHECKING:
    from flatout.data.sources.arrow.arrow_schema import Categories, Dates, Defaults, Names


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
    """Read rows of CSV or TSV files, compressed or not.

    Without a schema, the columns' types are inferred from the first mebibyte of the first file and
    of the last: whole numbers become int64, others float32, true and false bool. Several inputs are
    a dict of tensors by column. Blank lines are no rows.

    If an argument is None, the schema's option of that name holds, or else the default named below.
    The pipeline's notes state findings that a user may not expect.

    Args:
        paths: path, glob pattern or URL, or a list of these. All files have the same columns.
        target: name of the target's column, or a list of names; None if the data have no target.
        inputs: name of the input's column, or a list of names; None means all columns without
            another role.
        weight: name of the column of sample weights.
        unused: names of columns to leave out. Columns without a name, as pandas writes its index,
            are always left out.
        schema: a Schema, the path of one in TOML, or a dict; `target`, `inputs`, `weight` and
            `unused` then change its roles.
        delimiter: character between fields; None: a tab for files that end in .tsv or .tab, else
            the one of tab, semicolon, bar or comma that gives the first rows the same number of
            fields.
        decimal: character before a number's fraction; None: a comma if the delimiter is another
            character and no number of the first rows has a point, else a point.
        encoding: Python's name of the encoding, such as "cp1252"; a file that is not UTF-8 is
            copied into the cache folder as UTF-8, once. None: the encoding of a byte order mark,
            else UTF-8.
        header: whether the first line of each file has the names of the columns; or the names, for
            files without such a line. False names them f0, f1, ...; None: True, unless the first
            line has numbers above numbers.
        quote: character around fields that hold delimiters or newlines; "" if quotes have no
            meaning; None: a double quote.
        missing: texts that stand for a missing value; None: "", NA, N/A, n/a, #N/A, <NA>,
            NULL, null, None.
        default: value that replaces a missing value, in all columns or by column; None makes a
            missing value an error.
        categories: columns whose texts become numbers, with the texts in the order of these
            numbers: `{"color": ["red", "green"]}` makes int64 0 and 1, and other texts are errors.
            A list of names, or None in place of the texts, learns them from all rows. The sorted
            texts then get numbers from 1, and 0 stands for a missing or any other text. For a
            target, numbers start at 0, and other texts are errors. Other columns of text whose
            values repeat are learned too; columns of names or prose are refused.
        dates: columns of dates, or the format of each: `{"day": "%d.%m.%Y"}`. They become days
            since 1970-01-01, float32. ISO 8601 is detected in other columns, too.
        stack: put all numeric input columns (no categories) into one input, float32 of shape
            (columns,), which most models of tables need.
        skip_text: leave out columns of text that are no categories, instead of refusing them.
        allow_nan: accept NaN and infinite values; None: False.
        on_error: "fail", or "skip" bad rows: another number of fields, text in a column of numbers,
            missing and unknown values.
        max_errors: maximum number of rows to skip.

    Raises:
        DataError: a row is bad. The error names file and line, and what was expected and found.
    """
    require("pyarrow", "tables", "CSV")
    from flatout.data.sources.arrow.arrow_schema import ColumnOptions, listed
    from flatout.data.sources.csv.csv_rows import csv_rows

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
