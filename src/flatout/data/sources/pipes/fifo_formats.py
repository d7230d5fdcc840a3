"""Decoders of streams, which detect the form of records from the first record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from flatout.data.reading.block import Block
from flatout.data.reading.changed import Changes
from flatout.data.reading.decoder import Bytes, Split, StreamDecoder
from flatout.data.reading.schema import Given, Schema, as_schema
from flatout.data.sources.optional import require
from flatout.data.sources.pipes.framing import rows_within, split_recordio
from flatout.data.sources.pipes.recordio_protobuf import RecordioDecoder
from flatout.data.sources.records.criteo import CriteoDecoder, criteo_schema
from flatout.data.sources.records.libsvm import LibsvmDecoder
from flatout.data.sources.records.tfrecord import TfrecordDecoder
from flatout.errors import DataError
from flatout.kernels import example

Format = Literal["libsvm", "tfrecord", "criteo", "csv", "recordio"]
Wrap = Literal["recordio"]

WORDS: Mapping[str, str] = {
    "libsvm": "LibSVM",
    "tfrecord": "TFRecord",
    "criteo": "Criteo",
    "csv": "CSV",
    "recordio": "RecordIO",
}
# Bytes of a TFRecord's length and its checksum.
_TFRECORD_HEAD = 12


def stream_schema(format: Format, given: Given | None, wrap: Wrap | None) -> Schema:
    """Return the schema of a stream, which cannot be inferred from its rows."""
    if format not in WORDS:
        raise DataError(f"format: expected one of {', '.join(WORDS)}, found {format!r}")
    if wrap not in (None, "recordio") or (wrap and format == "recordio"):
        raise DataError(
            f"wrap: expected None, or 'recordio' around another format, found {wrap!r} around "
            f"{format}"
        )
    if format == "csv":
        require("pyarrow", "tables", "CSV")
    if given is None and format == "criteo":
        given = criteo_schema()
    if given is None:
        raise DataError(
            f"a stream of {WORDS[format]} wants a schema: its rows cannot be looked at in advance",
            do="write one from a sample in a file, with its schema.dump(path); or take that of "
            "other data: schema=other.schema",
        )
    schema = as_schema(given, format)
    # report a schema that does not fit before a pipe is opened
    decoder_of(schema, wrap, "the schema")
    return schema


def decoder_of(
    schema: Schema, wrap: Wrap | None, name: str, changes: Changes | None = None
) -> StreamDecoder:
    """Return a decoder for one pass over the pipe `name`; `changes` keeps the changed values."""
    if schema.format == "tfrecord" and wrap:
        return _Examples(schema)
    if schema.format == "csv":
        decoder: StreamDecoder = _Csv(schema, name, wrap is not None, changes or Changes())
    elif schema.format == "recordio":
        decoder = RecordioDecoder(schema)
    elif schema.format == "tfrecord":
        decoder = TfrecordDecoder(schema)
    else:
        kinds: dict[str, Any] = {"libsvm": LibsvmDecoder, "criteo": CriteoDecoder}
        decoder = kinds[schema.format](schema, changes=changes)
    return _Wrapped(decoder) if wrap else decoder


class _Wrapped:
    text = False

    def __init__(self, inner: StreamDecoder) -> None:
        self._inner = inner
        self.decode = inner.decode

    def split(self, buffer: Bytes, final: bool) -> Split:
        return rows_within(buffer, split_recordio(buffer, final), self._inner.split)


class _Examples:
    """RecordIO records that each hold an Example or a TFRecord file, as the first record shows."""

    text = False

    def __init__(self, schema: Schema) -> None:
        self._framed = TfrecordDecoder(schema)
        unchecked = schema.model_copy(update={"options": {**schema.options, "check": False}})
        self._bare = TfrecordDecoder(unchecked)
        self._inner: TfrecordDecoder | None = None

    def split(self, buffer: Bytes, final: bool) -> Split:
        outer = split_recordio(buffer, final)
        # An empty object, such as the marker of a folder in an object store, is no Example.
        filled = outer.ends > outer.starts
        outer = outer._replace(starts=outer.starts[filled], ends=outer.ends[filled])
        if self._inner is None and len(outer.starts):
            first = buffer[outer.starts[0] : outer.ends[0]][:_TFRECORD_HEAD]
            # One Example in 2**32 begins, by chance, like a length with its checksum.
            framed = len(first) == _TFRECORD_HEAD and not example.scan(first, final=False).problem
            self._inner = self._framed if framed else self._bare
        if self._inner is self._framed:
            return rows_within(buffer, outer, self._framed.split)
        return outer

    def decode(self, *args: Any) -> Block:
        assert self._inner is not None
        return self._inner.decode(*args)


class _Csv:
    """A decoder of CSV whose first row may have the names of the columns."""

    text = True

    def __init__(self, schema: Schema, name: str, headers: bool, changes: Changes) -> None:
        from flatout.data.sources.csv.csv_text import MISSING, dialect_of

        defaults = {"delimiter": ",", "quote": '"', "header": True, "missing": list(MISSING)}
        options = {**defaults, **schema.options}
        if options.get("encoding", "utf-8").lower() not in ("utf-8", "utf8", "ascii"):
            raise DataError(
                f"a stream of CSV is read as UTF-8, and the schema says {options['encoding']}",
                where=name,
                do="write UTF-8 into it: iconv -t UTF-8; and drop the schema's encoding",
            )
        self._schema = schema.model_copy(update={"options": options})
        self._dialect = dialect_of(options)
        self._name, self._headers, self._changes = name, headers, changes
        self._inner: StreamDecoder | None = None

    def split(self, buffer: Bytes, final: bool) -> Split:
        from flatout.data.sources.csv.csv_text import split_rows

        if self._inner is not None:
            return self._inner.split(buffer, final)
        rows = split_rows(buffer, final, self._dialect)
        if not len(rows.starts):
            return rows
        first, later = self._decoders(buffer, rows)
        self._inner = first if self._headers else later
        return first.split(buffer, final)

    def _decoders(self, buffer: Bytes, rows: Split) -> tuple[StreamDecoder, StreamDecoder]:
        from flatout.data.reading.files import File
        from flatout.data.sources.csv.csv_begin import FileBegin, shared_names
        from flatout.data.sources.csv.csv_decoder import CsvDecoder

        first = buffer[rows.starts[0] : rows.ends[0]].tobytes()
        begin = FileBegin(File("", self._name, 0, 0), buffer, rows, first)
        header = self._schema.options["header"]
        names = shared_names([begin], self._dialect, header)
        headers = frozenset({first}) if header is True else frozenset()
        return (
            CsvDecoder(self._schema, names, headers, changes=self._changes),
            CsvDecoder(self._schema, names, frozenset(), changes=self._changes),
        )

    def decode(self, *args: Any) -> Block:
        assert self._inner is not None
        return self._inner.decode(*args)
