"""Criteo's click logs: a label, 13 integers and 26 hexadecimal categories, between tabs."""

from __future__ import annotations

from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, Values
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import Changes, fields_by_row, note_rounded_fields
from flatout.data.reading.decoder import (
    Bytes,
    Encoded,
    Errors,
    Lengths,
    Split,
    Survey,
    good_rows,
    split_lines,
)
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import Paths
from flatout.data.reading.schema import Column, Given, Schema, as_schema
from flatout.errors import DataError
from flatout.kernels import criteo as kernel

# Number of integer fields and of category fields in a line.
INTEGERS, CATEGORIES = 13, 26


class CriteoDecoder:
    """Decoder of Criteo TSV.

    The schema's columns are `label` (left out where the lines have no label), `integers` and
    `categories`. Its option `buckets` takes each category modulo that number; 0 keeps categories.
    """

    needs_survey = False

    def __init__(self, schema: Schema, changes: Changes | None = None) -> None:
        self.schema = schema
        self.changes = Changes() if changes is None else changes
        names = {column.name for column in schema.columns}
        if names - {"label"} != {"integers", "categories"}:
            raise DataError(
                "the columns of Criteo are label, integers and categories; "
                f"found {', '.join(sorted(names))}"
            )
        self.has_label = "label" in names
        self._defaults = [_default_of(schema[name]) for name in ("integers", "categories")]
        self.buckets = int(schema.options.get("buckets", 0))
        self.integers, self.categories = schema["integers"], schema["categories"]

    def split(self, buffer: Bytes, final: bool) -> Split:
        return split_lines(buffer, final)

    def survey(self, rows: Encoded, policy: ErrorPolicy) -> Survey:
        return good_rows(self, rows, policy)

    def decode(
        self, rows: Encoded, lengths: Lengths, buffers: Buffers, policy: ErrorPolicy
    ) -> Block:
        errors, count = Errors(rows, kernel.Bad, policy), len(rows.starts)
        integers = buffers.empty((count, *self.integers.shape), self.integers.numpy_dtype)
        categories = buffers.empty((count, *self.categories.shape), self.categories.numpy_dtype)
        labels = None
        if self.has_label:
            labels = buffers.empty(count, self.schema["label"].numpy_dtype)
        bad = kernel.parse(
            *rows[:3],
            labels=labels,
            integers=integers,
            categories=categories,
            missing_integer=self._defaults[0],
            missing_category=int(self._defaults[1]),
            buckets=self.buckets,
            has_label=self.has_label,
            status=errors.status,
            at=errors.at,
        )
        columns: dict[str, Values] = {} if labels is None else {"label": labels}
        columns.update(integers=integers, categories=categories)
        fields_of = fields_by_row(rows, self._integer_fields)
        note_rounded_fields(self.changes, "integers", integers, rows, fields_of)
        return errors.block(columns, bad)

    def _integer_fields(self, row: bytes) -> list[bytes]:
        return row.split(b"\t")[int(self.has_label) :][:INTEGERS]


def _default_of(column: Column) -> float:
    if column.default is None:
        raise DataError(
            f"column {column.name!r}: fields of click logs may be empty, and the schema does not "
            "set the value of an empty field",
            do=f"set a default of {column.name!r}, such as default = 0",
        )
    return column.default


def criteo_schema(*, buckets: int = 0, label: bool = True) -> Schema:
    columns = [Column(name="label", dtype="float32", role="target")] if label else []
    columns.append(Column(name="integers", dtype="float32", shape=(INTEGERS,), default=0))
    columns.append(Column(name="categories", dtype="int64", shape=(CATEGORIES,), default=0))
    return Schema(format="criteo", columns=tuple(columns), options={"buckets": buckets})


def criteo(
    paths: Paths,
    *,
    schema: Given | None = None,
    buckets: int = 0,
    label: bool = True,
    on_error: OnError = "fail",
    max_errors: int = 100,
) -> Pipeline:
    """Read rows of Criteo's click logs, tab-separated, compressed or not.

    Inputs are `integers` (float32 of shape (13,), 0 if missing) and `categories` (int64 of shape
    (26,), from hexadecimal numbers, 0 if missing). The target is `label`, float32.

    Args:
        paths: path, glob pattern or URL, or a list of these.
        schema: a Schema, the path of one in TOML, or a dict; for other dtypes, counts or defaults.
        buckets: without a schema, each category is taken modulo this number; 0 keeps categories.
        label: without a schema, whether lines begin with a label, as in training files.
        on_error: "fail", or "skip" bad rows.
        max_errors: maximum number of rows to skip.

    Raises:
        DataError: a row is bad. The error names file and line, and what was expected and found.
    """
    from flatout.data.reading.files import find
    from flatout.data.reading.indexed import IndexedRows

    given = criteo_schema(buckets=buckets, label=label) if schema is None else schema
    decoder = CriteoDecoder(as_schema(given, "criteo"))
    return Pipeline(IndexedRows(find(paths), decoder, ErrorPolicy(on_error, max_errors), "Criteo"))
