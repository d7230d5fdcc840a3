"""LibSVM text, a row per line: `label [qid:n] index:value index:value ... # comment`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, Numbers, Ragged, Values, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import Changes, fields_by_row, note_rounded_fields
from flatout.data.reading.decoder import Bytes, Encoded, Errors, Lengths, Split, Survey, split_lines
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import Paths
from flatout.data.reading.schema import Column, Given, Schema, as_schema
from flatout.errors import DataError
from flatout.kernels import libsvm as kernel

Layout = Literal["dense", "fixed", "ragged"]

# Maximum number of features for which rows become dense vectors with one position for each feature.
_DENSE = 1024
# Limit of indices if the schema states no number of features. int64 can hold it plus the base.
_NO_LIMIT = 2**62
# Code of a row without the qid that the schema needs; the kernel itself has no such code.
_NO_QID = 255
# Width that no row exceeds, for ragged rows.
_ANY_WIDTH = 2**31 - 1


class LibsvmDecoder:
    """Decoder of LibSVM text.

    The schema's columns are `label`, perhaps `qid`, and either `features` (float32, one position
    for each feature) or `ids` and `values` (fixed or ragged). Its options are `base` (the smallest
    index, 0 or 1, which is subtracted from all) and `features` (the number of features). If the
    schema states rows for ids, nothing is subtracted.
    """

    def __init__(
        self, schema: Schema, notes: Sequence[str] = (), changes: Changes | None = None
    ) -> None:
        self.schema, self.notes = schema, list(notes)
        self.changes = Changes() if changes is None else changes
        names = {column.name for column in schema.columns}
        if names - {"qid"} not in ({"label", "features"}, {"label", "ids", "values"}):
            raise DataError(
                "the columns of LibSVM are label, perhaps qid, and either features or both ids and "
                f"values; the schema has {', '.join(sorted(names))}",
                do="let `flatout data inspect FILE --schema schema.toml` write one",
            )
        self.dense = "features" in names
        self.has_qid = "qid" in names
        self.needs_qid = self.has_qid and schema["qid"].role != "unused"
        self.base = int(schema.options.get("base", 0))
        self.limit = int(schema.options.get("features", _NO_LIMIT))
        self.width: int | None = None
        if self.dense:
            self.limit = schema["features"].shape[0]
        elif not schema["ids"].ragged:
            self.width = schema["ids"].shape[0]
        if not self.dense and schema["ids"].ids:
            # Ids are names, not positions: they do not change, and the map decides which ids are
            # known.
            self.base, self.limit = 0, _NO_LIMIT
        self.needs_survey = not self.dense and self.width is None

    def split(self, buffer: Bytes, final: bool) -> Split:
        """Find lines; blank lines and comments are no rows."""
        return split_lines(buffer, final, comment=b"#", white=b" \t\r")

    def survey(self, rows: Encoded, policy: ErrorPolicy) -> Survey:
        """Return lengths, and the facts from which a schema is inferred."""
        errors, count = Errors(rows, kernel.Bad, policy), len(rows.starts)
        lengths = np.empty(count, np.int32)
        labels = np.empty(count, np.float64)
        qid = np.empty(count, np.int64)
        _, low, high = kernel.survey(
            *rows[:3],
            lengths=lengths,
            labels=labels,
            qid=qid,
            status=errors.status,
            at=errors.at,
            base=self.base,
            limit=self.limit,
            label_as=self.schema["label"].numpy_dtype,
            width=_ANY_WIDTH if self.width is None else self.width,
        )
        good = errors.report()
        result = labels[good]
        facts: dict[str, float] = {
            "lowest": low,
            "highest": high,
            "shortest": int(lengths[good].min(initial=2**31 - 1)),
            "longest": int(lengths[good].max(initial=0)),
            "whole_labels": float((result == np.rint(result)).all() and (result >= 0).all()),
            "has_qid": float((qid[good] >= 0).any()),
        }
        wide = lengths.astype(np.int64)
        return Survey(good, {"ids": wide, "values": wide}, facts)

    def decode(
        self, rows: Encoded, lengths: Lengths, buffers: Buffers, policy: ErrorPolicy
    ) -> Block:
        errors = Errors(rows, kernel.Bad, policy, _without_qid)
        count = len(rows.starts)
        columns: dict[str, Values] = {
            "label": buffers.empty(count, self.schema["label"].numpy_dtype)
        }
        shared: dict[str, Any] = {
            "base": self.base,
            "limit": self.limit,
            "labels": columns["label"],
            "status": errors.status,
            "at": errors.at,
            "qid": np.empty(count, np.int64) if self.has_qid else None,
        }
        if self.has_qid:
            columns["qid"] = shared["qid"]
        if self.dense:
            out = columns["features"] = buffers.empty((count, self.limit), np.float32)
            bad = kernel.dense(*rows[:3], out=out, **shared)
        else:
            offsets = self._offsets(rows, lengths)
            ids = buffers.empty(int(offsets[-1]), self.schema["ids"].numpy_dtype)
            values = buffers.empty(int(offsets[-1]), self.schema["values"].numpy_dtype)
            bad = kernel.parse(*rows[:3], offsets, ids=ids, values=values, **shared)
            for name, flat in (("ids", ids), ("values", values)):
                if self.width is None:
                    columns[name] = Ragged(flat, offsets)
                else:
                    columns[name] = flat.reshape(count, self.width)
        if self.needs_qid:
            absent = (errors.status == 0) & (shared["qid"] < 0)
            errors.status[absent], errors.at[absent] = _NO_QID, rows.starts[absent]
            bad += int(absent.sum())
        for name in columns.keys() - {"ids", "qid"}:
            fields_of = fields_by_row(rows, _label if name == "label" else _values)
            note_rounded_fields(self.changes, name, columns[name], rows, fields_of)
        return errors.block(columns, bad)

    def _offsets(self, rows: Encoded, lengths: Lengths) -> Numbers:
        count = len(rows.starts)
        if self.width is not None:
            return np.arange(count + 1, dtype=np.int64) * self.width
        if lengths is None:
            # Bad rows are only reported when they are decoded.
            lengths = self.survey(rows, ErrorPolicy("skip", count)).lengths
        return offsets_of(lengths["ids"])


def _label(row: bytes) -> list[bytes]:
    return row.split(None, 1)[:1]


def _values(row: bytes) -> list[bytes]:
    return [pair.rpartition(b":")[2] for pair in row.partition(b"#")[0].split()[1:]]


def _without_qid(row: int, code: int) -> tuple[str, str] | None:
    if code != _NO_QID:
        return None
    return "expected qid: and a whole number, found a row without qid", "write it into each row"


def infer_schema(facts: Mapping[str, float], layout: Layout | None, base: int | None) -> Schema:
    if base is None:
        base = 0 if facts["lowest"] == 0 else 1
    features = max(1, int(facts["highest"]) - base + 1)
    longest = max(1, int(facts["longest"]))
    if layout is None:
        fixed = facts["shortest"] == facts["longest"]
        layout = "dense" if features <= _DENSE else "fixed" if fixed else "ragged"
    label: Any = "int64" if facts["whole_labels"] else "float32"
    columns = [Column(name="label", dtype=label, role="target")]
    if facts["has_qid"]:
        columns.append(Column(name="qid", dtype="int64", role="unused"))
    if layout == "dense":
        columns.append(Column(name="features", dtype="float32", shape=(features,)))
    elif layout in ("fixed", "ragged"):
        shape = (longest,) if layout == "fixed" else ()
        ragged = layout == "ragged"
        columns.append(Column(name="ids", dtype="int64", shape=shape, ragged=ragged))
        columns.append(Column(name="values", dtype="float32", shape=shape, ragged=ragged))
    else:
        raise DataError(f"layout: expected 'dense', 'fixed' or 'ragged', found {layout!r}")
    options = {"base": base, "features": features}
    return Schema(format="libsvm", columns=tuple(columns), options=options)


def _base_notes(facts: Mapping[str, float], base: int | None) -> list[str]:
    if base is not None or facts["lowest"] == 0:
        return []
    return ["no row has the index 0, so indexes count from 1: pass base=0 to count from 0"]


def _any_schema() -> Schema:
    columns = (
        Column(name="label", dtype="float64", role="target"),
        Column(name="ids", dtype="int64", ragged=True),
        Column(name="values", dtype="float32", ragged=True),
    )
    return Schema(format="libsvm", columns=columns)


def libsvm(
    paths: Paths,
    *,
    schema: Given | None = None,
    layout: Layout | None = None,
    base: int | None = None,
    on_error: OnError = "fail",
    max_errors: int = 100,
) -> Pipeline:
    """Read rows of LibSVM text files (also called SVMlight), compressed or not.

    Without a schema, all rows are read once when the files are opened, to find the number of
    features. The result is kept with the offset index in the cache folder. Give the same schema to
    training and validation data: `libsvm(test, schema=train.schema)`.

    Args:
        paths: path, glob pattern or URL, or a list of these.
        schema: a Schema, the path of one in TOML, or a dict.
        layout: without a schema, the form of rows: "dense" (float32 of shape (features,), the
            default up to 1,024 features), "fixed" (`ids` int64 and `values` float32, padded to the
            longest row), or "ragged" (the same, padded batch by batch).
        base: without a schema, the smallest index, 0 or 1; None means 1 unless there is an index 0.
        on_error: "fail", or "skip" bad rows.
        max_errors: maximum number of rows to skip.

    Returns:
        a Pipeline. Labels are int64 if all are whole numbers from 0, else float32.

    Raises:
        DataError: a row is bad. The error names file and line, and what was expected and found.
    """
    from flatout.data.reading.files import find
    from flatout.data.reading.indexed import IndexedRows, names_of, survey_files

    files = find(paths)
    if schema is None:
        # Bad rows are counted only when the index is built.
        looking = ErrorPolicy(on_error, max_errors)
        survey = survey_files(files, LibsvmDecoder(_any_schema()), looking)
        if not len(survey.starts):
            raise DataError("the files hold no rows that can be read", where=names_of(files))
        decoder = LibsvmDecoder(
            infer_schema(survey.facts, layout, base), _base_notes(survey.facts, base)
        )
    else:
        decoder = LibsvmDecoder(as_schema(schema, "libsvm"))
    return Pipeline(IndexedRows(files, decoder, ErrorPolicy(on_error, max_errors), "LibSVM"))
