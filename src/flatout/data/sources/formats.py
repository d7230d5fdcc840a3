"""Detection of the format of files, by their names or else by their first bytes; opening them."""

from __future__ import annotations

import os
import re
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from pathlib import PurePosixPath
from typing import Any

from flatout.data.pipeline import Pipeline
from flatout.data.reading.error_policy import OnError
from flatout.data.reading.files import File, Paths, find
from flatout.data.reading.schema import Given, Schema, read_toml
from flatout.data.sources.records.tfrecord import TARGETS
from flatout.errors import DataError, as_data_error
from flatout.kernels import masked_crc32c

# Names of all formats of files.
FORMATS = (
    *("libsvm", "tfrecord", "criteo", "csv", "parquet", "arrow", "images", "rows"),
    *("idx", "npy", "npz", "hdf5"),
)
# Value of `max_errors` that counts all bad rows without a limit.
NO_LIMIT = 2**62
# Formats whose sources can leave bad rows out.
SKIPPING = ("libsvm", "tfrecord", "criteo", "csv", "images")
_TABLES = ("csv", "parquet", "arrow")
_ARRAYS = ("idx", "npy", "npz", "hdf5")

# Format of a file by the suffix of its name.
_SUFFIXES = {
    **dict.fromkeys((".svm", ".libsvm", ".svmlight"), "libsvm"),
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), "tfrecord"),
    ".csv": "csv",
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    **dict.fromkeys((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff"), "images"),
    ".rows": "rows",
    ".npy": "npy",
    ".npz": "npz",
    **dict.fromkeys((".h5", ".hdf5"), "hdf5"),
}
# Suffixes of compressed files.
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_MAGIC = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"FEA1": "arrow",
    b"\x93NUMPY": "npy",
    b"PK\x03\x04": "npz",
    b"\x89HDF\r\n\x1a\n": "hdf5",
    b"\xff\xd8\xff": "images",
    b"\x89PNG": "images",
    b"GIF8": "images",
}
# Ends of names of parts, as other tools write them: day.tfrecord-00003-of-00012.
_PART = re.compile(r"-\d+-of-\d+$")
_IDX = re.compile(rb"\0\0[\x08\x09\x0b-\x0e][\x01-\x04]")
_NUMBER = rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
_LIBSVM = re.compile(rb"[ \t]*%b([ \t]+qid:\d+)?([ \t]+\d+:%b)*[ \t]*(#.*)?" % (_NUMBER, _NUMBER))
_CRITEO = re.compile(rb"([01]\t)?(-?\d*\t){13}([0-9a-f]{0,8}\t){25}[0-9a-f]{0,8}")
# First bytes of a file that are read to detect its format.
_LOOKED_AT = 1 << 16
# Maximum number of lines of a text that are checked to detect its format.
_LINES = 20


def guess(paths: Paths) -> str:
    """Return the format of files, one of FORMATS.

    The suffix decides; without a known suffix, the first bytes or lines decide.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    formats = [pair for path in given for pair in _formats(os.path.expanduser(os.fspath(path)))]
    kinds = Counter(kind for _, kind in formats)
    if len(kinds) > 1:
        first = {kind: name for name, kind in reversed(formats)}
        words = ", ".join(f"{first[kind]} is {kind}" for kind in kinds)
        raise DataError(
            f"the files are in different formats: {words}",
            do="name the files of one of them, or say which format all of them have",
        )
    if not kinds:
        raise DataError("expected at least one path, found an empty list")
    return next(iter(kinds))


def _formats(path: str) -> Iterator[tuple[str, str]]:
    if os.path.isdir(path):
        if path.rstrip("/").endswith(".rows") or os.path.exists(os.path.join(path, "meta.json")):
            yield path, "rows"
            return
        inside = [os.path.join(path, name) for name in sorted(os.listdir(path)) if name[0] != "."]
        if any(map(os.path.isdir, inside)) and not any(map(os.path.isfile, inside)):
            yield path, "images"  # a folder for each class
            return
    elif os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise DataError(
            "a pipe does not say what is in it, and looking would use it up",
            where=path,
            do="read it in Python: flatout.data.fifo(path, ...), which can be converted there",
        )
    by_name = _by_name(path)
    if by_name is not None and not os.path.isdir(path) and not any(sign in path for sign in "*?["):
        yield path, by_name
        return
    for file in find(path):
        yield file.name, _by_name(file.name) or _by_content(file)


def _by_name(name: str) -> str | None:
    path = PurePosixPath(_PART.sub("", name.lower()))
    while path.suffix in _PACKED:
        path = path.with_suffix("")
    if re.search(r"-(images|labels)[-.]idx[13]-ubyte$", path.name):
        return "idx"
    return _SUFFIXES.get(path.suffix)


def _by_content(file: File) -> str:
    with as_data_error("cannot be read", file.name), open(file.path, "rb") as opened:
        begin = opened.read(_LOOKED_AT)
    if not begin:
        raise DataError("the file is empty", where=file.name)
    kind = format_of(begin)
    if kind is None:
        raise DataError(
            f"no format that is known begins like this: {begin[:40]!r}",
            where=file.name,
            do=f"say which it is: one of {', '.join(FORMATS)}",
        )
    return kind


def format_of(begin: bytes) -> str | None:
    """Return the format of a file that begins with these bytes, or None."""
    for magic, kind in _MAGIC.items():
        if begin.startswith(magic):
            return kind
    if len(begin) >= 12 and masked_crc32c(begin[:8]) == struct.unpack_from("<I", begin, 8)[0]:
        return "tfrecord"
    if _IDX.match(begin):
        return "idx"
    return _text_format(begin)


# Bytes that no text has. Tabs, line ends, form feeds and DOS' end of file (Ctrl-Z) are allowed.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x19\x1b-\x1f]")


def _text_format(begin: bytes) -> str | None:
    whole = begin if len(begin) < _LOOKED_AT else begin[: begin.rfind(b"\n") + 1]
    lines = [line.rstrip(b"\r") for line in whole.split(b"\n")]
    lines = [line for line in lines if line.strip()][:_LINES]
    if not lines or _CONTROL.search(whole):
        return None
    if all(map(_CRITEO.fullmatch, lines)):
        return "criteo"
    rows = [line for line in lines if not line.lstrip().startswith(b"#")]
    # One bad row is allowed: the reader of the rows reports it.
    good = sum(_LIBSVM.fullmatch(line) is not None for line in rows)
    if b":" in whole and good and good >= len(rows) - 1:
        return "libsvm"
    fields = {max(line.count(b","), line.count(b"\t")) for line in lines}
    return "csv" if fields != {0} else None


def schema_format(schema: Given | None) -> str | None:
    """Return the format that a user's schema names, or None without a schema."""
    if schema is None or isinstance(schema, Schema):
        return None if schema is None else schema.format
    if isinstance(schema, dict):
        return schema.get("format")
    return read_toml(schema).get("format")


def open_files(
    paths: Paths,
    format: str | None = None,
    *,
    schema: Given | None = None,
    on_error: OnError = "fail",
    max_errors: int = 100,
    without_text: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Pipeline:
    """Open files of any format whose rows are numbers.

    Without a schema, the target of a table is the column that is called label, target, y, class or
    click, as in TFRecord files.
    """
    import flatout.data as sources

    kind = format or schema_format(schema) or guess(paths)
    if kind not in FORMATS:
        raise DataError(f"expected one of the formats {', '.join(FORMATS)}; found {kind!r}")
    source: Callable[..., Pipeline] = getattr(sources, kind)
    arguments = _checked(options or {}, kind, source)
    if schema is not None:
        arguments["schema"] = schema
    if kind in SKIPPING:
        arguments.update(on_error=on_error, max_errors=max_errors)
    elif on_error != "fail":
        raise DataError(f"rows of {kind} cannot be skipped: on_error is for {', '.join(SKIPPING)}")
    if kind in _TABLES:
        return _open_table(source, paths, arguments, without_text)
    if kind in _ARRAYS and schema is not None:
        raise DataError(f"files of {kind} say themselves what they hold; found a schema as well")
    if kind in ("idx", "rows"):
        return _open_folder(kind, paths, schema)
    return source(paths, **arguments)


def _checked(
    options: Mapping[str, Any], kind: str, source: Callable[..., Pipeline]
) -> dict[str, Any]:
    known = list(signature(source).parameters)[1:]
    for name in options:
        if name not in known or kind in ("idx", "rows"):
            raise DataError(
                f"{kind} has no option {name!r}",
                do=f"it takes {', '.join(known)}" if known else None,
            )
    return dict(options)


def _open_table(
    source: Callable[..., Pipeline], paths: Paths, options: dict[str, Any], without_text: bool
) -> Pipeline:
    if "schema" in options or "target" in options:
        if without_text and "schema" not in options:
            options["skip_text"] = True
        return source(paths, **options)
    if without_text:
        options["skip_text"] = True
    opened = source(paths, **options)
    names = [column.name for column in opened.schema.columns]
    targets = [name for name in names if name.lower() in TARGETS]
    return source(paths, target=targets[0], **options) if len(targets) == 1 else opened


def _open_folder(kind: str, paths: Paths, schema: Given | None) -> Pipeline:
    from flatout.data.sources.arrays.idx import idx
    from flatout.data.sources.records.rows import rows

    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if kind == "idx":
        return Pipeline(idx(given[0] if len(given) == 1 else (given[0], given[1])))
    if len(given) != 1:
        raise DataError(
            f"expected one folder of rows, found {len(given)}",
            do="read several with flatout.data.mix",
        )
    return rows(os.path.expanduser(os.fspath(given[0])), schema=schema)
