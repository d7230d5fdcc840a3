"""A schema for TFRecord files, inferred from their first records.

The wire format is that of Protocol Buffers (https://protobuf.dev/programming-guides/encoding); the
messages are those of TensorFlow's `example.proto` and `feature.proto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.schema import Column, Schema
from flatout.data.sources.records.protobuf import fields, message
from flatout.errors import DataError

# Names of features that are taken for the target, if the user names none.
TARGETS = ("label", "labels", "target", "targets", "y", "class", "click", "clicked")
_KINDS = {1: "bytes", 2: "float", 3: "int64"}
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
        kind = _KINDS.get(number, "")
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
