"""TFRecord files of tf.train.Example messages, and a schema inferred from their first records.

The wire format is that of Protocol Buffers (https://protobuf.dev/programming-guides/encoding); the
messages are those of TensorFlow's `example.proto` and `feature.proto`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, Ragged, Values, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.decoder import Bytes, Encoded, Errors, Lengths, Split, Survey
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import File, Paths
from flatout.data.reading.schema import Column, Given, Schema, as_schema
from flatout.data.sources.records.protobuf import fields, message
from flatout.errors import DataError
from flatout.kernels import example as kernel

# Names of features that are taken for the target, if the user names none.
TARGETS = ("label", "labels", "target", "targets", "y", "class", "click", "clicked")
_LISTS = {1: "bytes", 2: "float", 3: "int64"}
_DTYPES = {"bytes": "uint8", "float": "float32", "int64": "int64"}


class FeatureKind(NamedTuple):
    """One feature of one record.

    Attributes:
        kind: "bytes", "float", "int64", or "" if it is empty.
        values: number of values, or of bytes.
    """

    kind: str
    values: int


def infer_schema(records: Iterable[tuple[int, bytes]], where: str, policy: ErrorPolicy) -> Schema:
    """Return a schema that fits these records.

    Columns of bytes, and of features that differ in length, are ragged.
    """
    features: dict[str, list[FeatureKind]] = {}
    for byte, record in records:
        try:
            features_here = features_of(record)
        except ValueError as error:
            policy.bad(f"the record is no tf.train.Example: {error}", f"{where}: byte {byte:,}")
            continue
        if "" in features_here:
            policy.bad(
                "expected a name for each feature, found an empty name", f"{where}: byte {byte:,}"
            )
            continue
        for name, value in features_here.items():
            features.setdefault(name, []).append(value)
    if not features:
        raise DataError("the records hold no features, or there are none", where=where)
    columns = [_column(name, features[name], where) for name in sorted(features)]
    return Schema(format="tfrecord", columns=tuple(columns))


def with_defaults(schema: Schema, given: float | Mapping[str, float] | None) -> Schema:
    """Return the schema with defaults: one number for all columns, or a number by column."""
    if given is None:
        return schema
    names = [column.name for column in schema.columns]
    by_name = given if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name in by_name:
        if name not in names:
            raise DataError(f"default: no column {name!r}: the columns are {', '.join(names)}")
    columns = [c.model_copy(update={"default": by_name.get(c.name)}) for c in schema.columns]
    return schema.model_copy(update={"columns": tuple(columns)})


def _column(name: str, features: list[FeatureKind], where: str) -> Column:
    kinds = {feature.kind for feature in features if feature.kind}
    if len(kinds) > 1:
        raise DataError(f"feature {name!r} holds {' and '.join(sorted(kinds))}", where=where)
    kind = kinds.pop() if kinds else "float"
    counts = {feature.values for feature in features}
    fixed = len(counts) == 1 and kind != "bytes" and counts != {0}
    count = counts.pop() if fixed else 0
    role: Any = "target" if name.lower() in TARGETS else "input"
    return Column(
        name=name,
        dtype=_DTYPES[kind],  # type: ignore[arg-type]
        shape=(count,) if count > 1 else (),
        ragged=not fixed,
        role=role,
        lengths=f"{name}_lengths" if not fixed and role == "input" else None,
    )


def features_of(record: bytes) -> dict[str, FeatureKind]:
    """Return kind and number of values of each feature of an Example."""
    result = {}
    for number, features in fields(record):
        if number != 1:
            continue
        for key, entry in fields(features):
            if key == 1:
                parts = dict(fields(entry))
                result[message(parts.get(1, b"")).decode()] = _kind_of(parts.get(2, b""))
    return result


def _kind_of(feature: Any) -> FeatureKind:
    kind, count = "", 0
    for number, values in fields(feature):
        kind = _LISTS.get(number, "")
        count += sum(_count(kind, value) for key, value in fields(values) if key == 1)
    return FeatureKind(kind, count)


def _count(kind: str, value: Any) -> int:
    if isinstance(value, int):  # the value is not packed
        return 1
    if kind == "bytes":
        return len(value)
    if kind == "float":
        return len(value) // 4 or 1
    return sum(byte < 128 for byte in value)


_KINDS: dict[str, Literal["int64", "float", "bytes"]] = {
    "int64": "int64",
    "int32": "int64",
    "float32": "float",
    "uint8": "bytes",
}


class TfrecordDecoder:
    """Decoder of Examples. A column of the schema is a feature of the same name.

    int64 and int32 columns are int64 lists, float32 columns float lists, uint8 columns the bytes of
    one value. A missing feature becomes the column's default; without a default it is an error. The
    option `check` (True) sets whether both checksums of each record are compared.
    """

    text = False
    # Bytes before the data (length and its checksum) and after the data (the data's checksum).
    margins = (12, 4)

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        for column in schema.columns:
            if column.dtype not in _KINDS:
                raise DataError(
                    f"column {column.name!r}: Examples hold {', '.join(_KINDS)}, "
                    f"found {column.dtype}"
                )
        self.check = bool(schema.options.get("check", True))
        self._plan = kernel.Plan([_feature(column) for column in schema.columns])
        self._ragged = [column.name for column in schema.columns if column.ragged]
        self._defaults = [column.default or 0 for column in schema.columns]
        self.needs_survey = bool(self._ragged)

    def split(self, buffer: Bytes, final: bool) -> Split:
        """Find records by their framing, and compare the checksum of each length."""
        result = kernel.scan(buffer, final=final)
        return Split(result.starts, result.ends, result.consumed, result.problem)

    def survey(self, rows: Encoded, policy: ErrorPolicy) -> Survey:
        errors = Errors(rows, kernel.Bad, policy, partial(self._explain, rows))
        lengths = np.zeros((len(self._ragged), len(rows.starts)), np.int64)
        kernel.measure(
            *rows[:3], self._plan, lengths=lengths, status=errors.status, at=errors.at,
            check=self.check,
        )  # fmt: skip
        return Survey(errors.report(), dict(zip(self._ragged, lengths, strict=True)), {})

    def decode(
        self, rows: Encoded, lengths: Lengths, buffers: Buffers, policy: ErrorPolicy
    ) -> Block:
        errors = Errors(rows, kernel.Bad, policy, partial(self._explain, rows))
        count = len(rows.starts)
        if lengths is None and self.needs_survey:
            # Bad rows are only reported when they are decoded.
            lengths = self.survey(rows, ErrorPolicy("skip", count)).lengths
        columns: dict[str, Values] = {}
        outputs, all_offsets = [], []
        for column in self.schema.columns:
            offsets = None
            if column.ragged:
                assert lengths is not None
                offsets = offsets_of(lengths[column.name])
                flat = buffers.empty(int(offsets[-1]), column.numpy_dtype)
                columns[column.name] = Ragged(flat, offsets)
            else:
                width = math.prod(column.shape)
                flat = buffers.empty((count, width), column.numpy_dtype)
                columns[column.name] = flat.reshape(count, *column.shape)
            outputs.append(flat)
            all_offsets.append(offsets)
        bad = kernel.decode(
            *rows[:3],
            self._plan,
            outputs=outputs,
            offsets=all_offsets,
            defaults=self._defaults,
            status=errors.status,
            at=errors.at,
            check=self.check,
        )
        return errors.block(columns, bad)

    def _explain(self, rows: Encoded, row: int, code: int) -> tuple[str, str] | None:
        """Return a line about a feature that a record lacks, and the advice to set a default."""
        if code != kernel.Bad.MISSING:
            return None
        record = rows.buffer[rows.starts[row] : rows.ends[row]].tobytes()
        found = {name for name, feature in features_of(record).items() if feature.kind}
        wanted = (column.name for column in self.schema.columns if column.default is None)
        name = next(name for name in wanted if name not in found)
        words = f"expected a feature {name!r}, found {', '.join(sorted(found)) or 'none'}"
        return words, f"set a default: default={{{name!r}: 0}}, or default = 0 in the schema"


def _feature(column: Column) -> Any:
    width = None if column.ragged else math.prod(column.shape)
    kind = _KINDS[column.dtype]
    return kernel.Feature(column.name.encode(), kind, width, required=column.default is None)


# Records from which a schema is inferred, where none is given.
_LOOKED_AT = 1000
# Bytes that are read at a time to find the first records.
_PIECE = 8 << 20


def tfrecord(
    paths: Paths,
    *,
    schema: Given | None = None,
    target: str | None = None,
    default: float | Mapping[str, float] | None = None,
    check: bool = True,
    on_error: OnError = "fail",
    max_errors: int = 100,
) -> Pipeline:
    """Read rows of TFRecord files of tf.train.Example messages, whole files compressed or not.

    Without a schema, the features are found in the first 1,000 records. The target is then the
    feature `target`, or one with a name such as label, target, y, class or click.

    Args:
        paths: path, glob pattern or URL, or a list of these.
        schema: a Schema, the path of one in TOML, or a dict.
        target: without a schema, the name of the target.
        default: without a schema, the value of a feature that a record lacks: one number for all
            columns, or a number by column. None makes it an error. A ragged column stays empty.
        check: compare both checksums of every record; False leaves out that of the data.
        on_error: "fail", or "skip" bad rows.
        max_errors: maximum number of rows to skip.

    Raises:
        DataError: a record is bad. The error names file and byte, and what was expected and found.
    """
    from flatout.data.reading.files import find
    from flatout.data.reading.indexed import IndexedRows

    files = find(paths)
    if schema is None:
        looking = ErrorPolicy(on_error, max_errors)
        first, records = _first_records(files, looking, check)
        given = infer_schema(records, first.name, looking)
        if target is not None:
            given = given.with_target(target)
        given = with_defaults(given, default)
    else:
        given = as_schema(schema, "tfrecord")
    if not check:
        given = given.model_copy(update={"options": {**given.options, "check": False}})
    decoder = TfrecordDecoder(given)
    return Pipeline(IndexedRows(files, decoder, ErrorPolicy(on_error, max_errors), "TFRecord"))


def _first_records(
    files: Sequence[File], policy: ErrorPolicy, check: bool
) -> tuple[File, list[tuple[int, bytes]]]:
    for file in files:
        records = []
        for start, record, crc in _records(file):
            if check and kernel.masked_crc32c(record) != crc:
                policy.bad(kernel.Bad.DATA_CRC.words, f"{file.name}: byte {start:,}")
            else:
                records.append((start, record))
            if len(records) == _LOOKED_AT:
                break
        if records:
            return file, records
    raise DataError("the files hold no records", where=", ".join(file.name for file in files[:3]))


def _records(file: File) -> Iterator[tuple[int, bytes, int]]:
    with open(file.path, "rb") as opened:
        place, rest = 0, b""
        while piece := opened.read(_PIECE):
            rest += piece
            result = kernel.scan(rest, final=opened.tell() >= file.size)
            for start, end in zip(result.starts.tolist(), result.ends.tolist(), strict=True):
                crc = int.from_bytes(rest[end : end + 4], "little")
                yield place + start, rest[start:end], crc
            place, rest = place + result.consumed, rest[result.consumed :]
            if result.problem:
                raise DataError(result.problem, where=f"{file.name}: byte {place:,}")
