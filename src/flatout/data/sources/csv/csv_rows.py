"""Opens CSV files: finds their dialect, their columns and their rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flatout.cache_folder import keep_text, kept_text
from flatout.data.reading.block import Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.decoder import Bytes, Encoded
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import File, in_utf8
from flatout.data.reading.indexed import IndexedRows
from flatout.data.reading.schema import Column, Given, Schema
from flatout.data.reading.threads import Pool
from flatout.data.sources.arrow.arrow_schema import (
    ISO,
    ISO_WITH_ZONE,
    TIME,
    ColumnOptions,
    check_options,
    given_schema,
    infer_schema,
    is_date,
)
from flatout.data.sources.arrow.vocabulary import (
    Texts,
    left_out_notes,
    merged,
    notes_of,
    texts_of,
    with_vocabularies,
)
from flatout.data.sources.csv.csv_begin import (
    UNNAMED,
    FileBegin,
    begin_of,
    fields_of,
    found_types,
    has_header,
    marked_encoding,
    sample_of,
    samples_of,
    shared_names,
    sniff_decimal,
    sniff_delimiter,
)
from flatout.data.sources.csv.csv_decoder import CsvDecoder
from flatout.data.sources.csv.csv_text import (
    MISSING,
    Dialect,
    dialect_of,
    in_one_piece,
    is_readable,
    not_utf8,
    read_text,
)
from flatout.measure import usable_cpus

# Options that CSV schemas may have in addition to the options of all tables.
_OPTIONS = ("delimiter", "quote", "header", "missing", "bools", "decimal", "encoding")
# Rows whose texts one task reads.
_LOOKED_AT = 1 << 16
# Version of the cached texts.
_VERSION = 1


class _Opened(NamedTuple):
    """CSV files, and their dialect.

    Attributes:
        begins: the first bytes of each file, in UTF-8.
        options: options of the schema.
        dialect: the dialect of the files.
        names: names of the columns.
        headers: lines that are headers, not rows, if they are first in a file.
        notes: lines about findings that the user may not expect.
    """

    begins: list[FileBegin]
    options: dict[str, Any]
    dialect: Dialect
    names: list[str]
    headers: frozenset[bytes]
    notes: list[str]


def csv_rows(
    files: Sequence[File],
    wanted: ColumnOptions,
    policy: ErrorPolicy,
    schema: Given | None = None,
    **given: Any,
) -> IndexedRows:
    """Open the rows of CSV files. Arguments are those of `csv`; values of `given` may be None."""
    options = {name: value for name, value in given.items() if value is not None}
    base = None
    if schema is not None:
        base = given_schema(schema, "csv", wanted, options)
        options = base.options
    opened = _open(files, options)
    files = [begin.file for begin in opened.begins]
    if base is None:
        return _inferred(files, opened, wanted, policy)
    base = base.model_copy(update={"options": opened.options})
    check_options(base, _OPTIONS)
    named = [name for name in opened.names if not name.startswith(UNNAMED)]
    notes = [*opened.notes, *left_out_notes(base, named)]
    return IndexedRows(files, CsvDecoder(base, opened.names, opened.headers, notes), policy, "CSV")


def _open(files: Sequence[File], given: Mapping[str, Any]) -> _Opened:
    notes: list[str] = []
    options = {"quote": '"', "missing": list(MISSING), **given}
    dialect_of({"delimiter": ",", **options})  # report invalid signs before other errors
    files = [_as_utf8(file, options.get("encoding"), notes) for file in files]
    text, quote = sample_of(files[0]), options["quote"]
    if "delimiter" not in options:
        is_tsv = all({".tsv", ".tab"} & set(Path(file.name).suffixes) for file in files)
        options["delimiter"] = "\t" if is_tsv else sniff_delimiter(text, quote)
        if not is_tsv and options["delimiter"] != ",":
            notes.append(f"fields are parted by {options['delimiter']!r}")
    dialect = dialect_of(options)
    rows = fields_of(text, dialect.delimiter, dialect.quote)
    if "decimal" not in options and sniff_decimal(rows, dialect.delimiter) == ",":
        options["decimal"] = ","
        dialect = dialect._replace(decimal=",")
        notes.append("numbers have a decimal comma")
    if "header" not in options:
        options["header"] = has_header(rows, dialect.decimal, dialect.missing)
        if not options["header"]:
            notes.append(
                "the first row looks like the others, so it is data, and the columns are called "
                "f0, f1, ...: header=[names] names them, header=True takes it for names"
            )
    header = options["header"]
    begins = [begin_of(file, dialect) for file in files]
    names = shared_names(begins, dialect, header)
    headers = frozenset(begin.first for begin in begins) if header is True else frozenset()
    return _Opened(begins, options, dialect, names, headers, notes)


def _as_utf8(file: File, encoding: str | None, notes: list[str]) -> File:
    marked = None if encoding is not None else marked_encoding(file)
    if marked is not None:
        note = f"read as {marked.upper()}, which the byte order mark tells"
        if note not in notes:
            notes.append(note)
    result = encoding or marked
    return file if result is None else in_utf8(file, result)


def _inferred(
    files: Sequence[File], opened: _Opened, wanted: ColumnOptions, policy: ErrorPolicy
) -> IndexedRows:
    names, options = opened.names, opened.options
    is_headed = options["header"] is True
    samples = samples_of(opened.begins, is_headed)
    wanted = wanted.without([name for name in names if name.startswith(UNNAMED)])
    types = found_types(samples, names, opened.dialect, wanted)
    rows = None

    def count(columns: Sequence[str], few: bool) -> Mapping[str, Texts]:
        nonlocal rows
        if few:
            return _texts_in_samples(samples, opened, columns)
        if rows is None:
            blank = (Column(name=names[0], dtype="int64", role="unused"),)
            bare = Schema(format="csv", columns=blank, options=options)
            decoder = CsvDecoder(bare, names, opened.headers)
            rows = IndexedRows(files, decoder, ErrorPolicy(), "CSV")
        return _learned(rows, opened, columns, policy)

    wanted = with_vocabularies(_with_dates(wanted, types), types, count)
    schema = infer_schema("csv", types, wanted, options)
    # A stacked column is float32 in the schema, but its words true and false are read as bool.
    bools = [name for name in schema.options.get("stack", ()) if types[name] == pa.bool_()]
    if bools:
        schema = schema.model_copy(update={"options": {**schema.options, "bools": bools}})
    check_options(schema, _OPTIONS)
    notes = [*opened.notes, *notes_of(schema.options, wanted.numberish)]
    decoder = CsvDecoder(schema, names, opened.headers, notes)
    for begin in samples:
        decoder.look(_encoded(begin))
    if rows is None:
        return IndexedRows(files, decoder, policy, "CSV")
    return rows.read_by(decoder, policy)


def _encoded(begin: FileBegin) -> Encoded:
    def where(row: int, byte: int) -> str:
        line = begin.text[:byte].tobytes().count(b"\n") + 1
        return f"{begin.file.name}:{line} (byte {byte:,})"

    starts, ends = begin.rows.starts, begin.rows.ends
    return Encoded(begin.text, starts, ends, np.arange(len(starts)), where)


def _with_dates(wanted: ColumnOptions, types: Mapping[str, pa.DataType]) -> ColumnOptions:
    formats = wanted.date_formats(types)
    coded = {*wanted.fixed_categories(types), *wanted.asked_categories(types)}
    roles = wanted.roles(dict.fromkeys(types, "input"))
    for name, type in types.items():
        is_free = name not in coded and roles[name] != "unused"
        if formats.get(name, ISO) == ISO and is_date(type) and is_free:
            with_zone = ISO_WITH_ZONE if getattr(type, "tz", None) else ISO
            formats[name] = TIME if pa.types.is_time(type) else with_zone
    return wanted.with_dates(formats)


def _texts_in_samples(
    samples: Sequence[FileBegin], opened: _Opened, columns: Sequence[str]
) -> dict[str, Texts]:
    return merged(
        _texts(in_one_piece(begin.text, begin.rows.starts, begin.rows.ends), opened, columns, None)
        for begin in samples
    )


def _texts(
    text: Any, opened: _Opened, columns: Sequence[str], policy: ErrorPolicy | None
) -> dict[str, Texts]:
    types = dict.fromkeys(columns, pa.binary())
    table = read_text(text, opened.names, opened.dialect, types, columns, skip_invalid=True)
    result = {}
    for name, texts in texts_of(table, columns).items():
        strict = policy is not None and not policy.skip
        values = set()
        for value in texts.values:
            try:
                values.add(value.decode())
            except UnicodeDecodeError:
                if strict:
                    raise
        result[name] = Texts(frozenset(values), texts.rows)
    return result


def _learned(
    rows: IndexedRows, opened: _Opened, columns: Sequence[str], policy: ErrorPolicy
) -> Mapping[str, Texts]:
    # The digest of the rows reads only the ends of the files.
    written = [(file.path, file.mtime_ns) for file in rows.files]
    words = json.dumps(
        [_VERSION, rows.digest, written, opened.names, list(columns), *opened.dialect, policy.skip]
    )
    digest = hashlib.sha256(words.encode()).hexdigest()[:24]
    # The entry is in the same folder as the index of the rows.
    entry = f"{digest}.json"
    # An entry that cannot be loaded is made again.
    with suppress(Exception):
        kept = json.loads(kept_text("index", entry) or "")
        return {name: Texts(frozenset(kept[name][0]), kept[name][1]) for name in columns}

    def look(start: int) -> dict[str, Texts]:
        numbers = np.arange(start, min(start + _LOOKED_AT, rows.rows))
        buffer, starts, ends, _, where = rows.encoded(numbers, Buffers())
        try:
            return _texts(in_one_piece(buffer, starts, ends), opened, columns, policy)
        except UnicodeDecodeError as error:
            row, byte, result = _row_of(error.object, buffer, starts, ends)
            policy.bad(result, where(row, int(starts[row]) + byte))
            raise

    with Pool(usable_cpus()) as pool:
        result = merged(pool.map(look, range(0, rows.rows, _LOOKED_AT)))
    kept = {name: [sorted(texts.values), texts.rows] for name, texts in result.items()}
    # If the cache cannot be written, the texts are read again at the next start.
    with suppress(OSError):
        keep_text("index", entry, json.dumps(kept))
    return result


def _row_of(text: bytes, buffer: Bytes, starts: Numbers, ends: Numbers) -> tuple[int, int, str]:
    rows = [buffer[start:end].tobytes() for start, end in zip(starts, ends, strict=True)]
    at, result = not_utf8(text)
    for number, row in enumerate(rows):
        if text in row:
            return number, row.index(text) + at, result
    # Doubled quotes in the row are single quotes in the text.
    number = next(number for number, row in enumerate(rows) if not is_readable(row))
    return (number, *not_utf8(rows[number]))
