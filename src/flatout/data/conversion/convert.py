"""Conversion of data from one format to another: TFRecord, Parquet, or Flatout's row cache."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from flatout.data.conversion.converted import Converted, ShardSizes, To
from flatout.data.conversion.job import Conversion, job_of, pieces_of
from flatout.data.conversion.progress import progress as showing
from flatout.data.conversion.shards import (
    CountedFile,
    Encoded,
    Manifest,
    ShardFiles,
    Writer,
    begin,
    disk,
    write_shards,
)
from flatout.data.conversion.stream import write_stream
from flatout.data.pipeline import Pipeline
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import Paths
from flatout.data.reading.origins import is_stream
from flatout.data.reading.schema import Given
from flatout.data.sources import formats
from flatout.data.sources.images.image_bytes import ImageBytes
from flatout.data.stores.row_store import layout_of
from flatout.errors import DataError
from flatout.words import size_words

# Version of the written bytes. It is increased when the same rows are written as other bytes.
_VERSION = 1


def convert(
    source: Paths | Pipeline,
    target: str | os.PathLike[str],
    *,
    to: To | None = None,
    schema: Given | None = None,
    format: str | None = None,
    shuffle: int | None = None,
    shards: int | None = None,
    rows_per_shard: int | None = None,
    shard_bytes: int | None = None,
    balance: Literal["class", "spread"] | None = None,
    sampling: Literal["over", "under"] = "over",
    on_error: OnError = "fail",
    max_errors: int = 100,
    overwrite: bool = False,
    progress: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Converted:
    """Write data in another format.

    Shards have names such as `name-00000-of-00012.tfrecord` and the same number of rows, give or
    take one. A shard is either complete or absent. The same folder gets a manifest with checksums,
    `_name.tfrecord.json`, and the schema that reads the shards, `_name.tfrecord.toml`. After a
    kill, the same call continues after the shards that are done; a row cache is started again. The
    same data and settings give the same bytes.

    Image folders become TFRecord shards with the unchanged files: `image`, `label` and `path`. In
    other formats, and from a Pipeline, images are written decoded.

    Args:
        source: path, glob pattern or URL, or a list of these, a folder of images, or a Pipeline
            without batch. From a Pipeline, the samples of epoch 0 are written, after all its
            stages.
        target: `out/train.tfrecord`, `out/train.parquet` or `out/train.rows`, without numbers.
        to: the format, if the target's name does not state it.
        schema: schema of the source, as the source's function accepts it; not with a Pipeline.
        format: format of the source, one of `formats.FORMATS`; None means the schema's format,
            or a guess from the files.
        shuffle: seed of the shuffled order; None keeps the source's order.
        shards: number of files; None makes files of about `shard_bytes`.
        rows_per_shard: maximum number of rows in a file, in place of `shards`.
        shard_bytes: approximate bytes of a file, in place of `shards`; None means 128 MiB.
        balance: "class" writes the same number of rows of each class, "spread" writes all rows
            once. Both spread each class evenly over all files, and within them.
        sampling: for balance="class": "over" repeats rows of rarer classes, "under" leaves out rows
            of more frequent ones. The rows are drawn with the seed `shuffle`, else 0.
        on_error: "fail", or "skip" bad rows.
        max_errors: maximum number of rows to skip.
        overwrite: replace files that other settings or other data have made.
        progress: show progress on standard error, from the second second on.
        options: more arguments of the source's function, such as `{"delimiter": ";"}` of CSV; not
            with a Pipeline.

    Raises:
        DataError: the source cannot be read; the target exists and was made with other settings;
            a column does not fit into the format; the disk is full; or an argument makes no sense.
    """
    began = time.monotonic()
    path = Path(os.path.expanduser(target))
    kind = _kind(path, to)
    sizes = ShardSizes(shards, rows_per_shard, shard_bytes)
    sizes.check(kind)
    _check_balance(balance, sampling)
    if not isinstance(source, Pipeline):
        source = _opened(source, kind, format, schema, on_error, max_errors, options or {})
    elif schema is not None or format is not None or options:
        raise DataError(
            "a pipeline has its schema already; found schema, format or options as well"
        )
    with disk(path.parent, lambda: "nothing was written"):
        path.parent.mkdir(parents=True, exist_ok=True)
    if is_stream(source.origin):
        if shuffle is not None or balance is not None or kind == "rows":
            raise DataError(
                "the rows of a stream come once, in their own order, and their number is not known",
                do="convert it to TFRecord or Parquet as it comes; shuffle, balance or make a row "
                "cache of these files",
            )
        place = _place(path, kind, None)
        return write_stream(source, place, _writer(kind), sizes, overwrite, progress, began)
    job = job_of(source, shuffle, balance, sampling)
    if kind == "rows":
        return _to_rows(job, path, overwrite, progress, began)
    return _to_shards(job, path, kind, sizes, overwrite, progress, began)


def _check_balance(balance: Any, sampling: Any) -> None:
    if balance not in (None, "class", "spread"):
        raise DataError(f"balance: expected 'class', 'spread' or None, found {balance!r}")
    if sampling not in ("over", "under"):
        raise DataError(f"sampling: expected 'over' or 'under', found {sampling!r}")
    if sampling == "under" and balance != "class":
        raise DataError("sampling='under' is for balance='class'", do="pass both, or neither")


def _kind(path: Path, to: str | None) -> str:
    known = get_args(To)
    kind = to or path.suffix.removeprefix(".")
    if kind not in known:
        raise DataError(
            f"expected one of the formats {', '.join(known)}; found {kind or 'none'}",
            where=str(path),
            do="call the target train.tfrecord, train.parquet or train.rows, or say to=",
        )
    if kind != "rows" and path.is_dir():
        raise DataError(
            "the target is a folder",
            where=str(path),
            do=f"name the shards as well: {path / 'train'}.{kind}",
        )
    return kind


def _opened(
    paths: Paths,
    kind: str,
    format: str | None,
    schema: Given | None,
    on_error: OnError,
    max_errors: int,
    options: Mapping[str, Any],
) -> Pipeline:
    format = format or formats.schema_format(schema) or formats.guess(paths)
    if format == "images" and kind == "tfrecord" and schema is None and not options:
        return Pipeline(ImageBytes(paths, ErrorPolicy(on_error, max_errors)))
    return formats.open_files(
        paths, format, schema=schema, on_error=on_error, max_errors=max_errors, options=options
    )


def _writer(kind: str) -> type[Any]:
    if kind == "tfrecord":
        from flatout.data.conversion.writers.tfrecord import TfrecordWriter

        return TfrecordWriter
    from flatout.data.sources.optional import require

    require("pyarrow", "tables", "Parquet")
    from flatout.data.conversion.writers.parquet import ParquetWriter

    return ParquetWriter


def _place(path: Path, kind: str, count: int | None) -> ShardFiles:
    suffix = f".{kind}"
    return ShardFiles(path.parent, path.name.removesuffix(suffix), suffix, count)


def _to_shards(
    job: Conversion,
    path: Path,
    kind: str,
    sizes: ShardSizes,
    overwrite: bool,
    progress: bool,
    began: float,
) -> Converted:
    writer: Writer = _writer(kind)(job.schema)
    each = _encoded_bytes(writer, job) / len(job.probe)
    counts = sizes.counts(len(job.numbers), each)
    place = _place(path, kind, len(counts))
    settings = {**job.settings, "to": kind, "shards": len(counts), "version": _VERSION}
    manifest = Manifest(settings, writer.schema.dumps(), len(job.numbers))
    pieces = pieces_of(counts, job.probe, writer.piece_bytes)
    with disk(place.folder, lambda: place.done(manifest)), place.locked():
        manifest = begin(place, manifest, overwrite)
        result = sum(shard.rows for shard in manifest.shards)
        if not manifest.complete:
            _check_room(place.folder, (len(job.numbers) - result) * each)
            with showing("converting", len(job.numbers), progress) as tell:
                write_shards(
                    place,
                    writer,
                    manifest,
                    pieces,
                    lambda missing: job.make(missing, lambda b: Encoded(len(b), writer.encode(b))),
                    tell,
                    job.notes,
                )
    classes = job.origin.classes if isinstance(job.origin, ImageBytes) else None
    return Converted.of_shards(place, manifest, result, began, classes)


def _to_rows(
    job: Conversion, path: Path, overwrite: bool, progress: bool, began: float
) -> Converted:
    from flatout.data.conversion.writers import rows as folder

    schema = folder.rows_schema(job.schema)
    settings = {**job.settings, "version": _VERSION}
    total = len(job.numbers)
    pieces = pieces_of([total], job.probe, folder.PIECE_BYTES)
    with disk(path.parent, lambda: "nothing of it stays"):
        is_there = folder.is_there(path, settings, overwrite)
        if not is_there:
            with showing("converting", total, progress) as tell:
                folder.write_rows(
                    path,
                    layout_of(job.probe.columns),
                    schema,
                    settings,
                    pieces,
                    lambda missing: job.make(missing, lambda block: block),
                    tell,
                    job.notes,
                )
    return Converted.of_folder(path, total, total if is_there else 0, began)


def _encoded_bytes(writer: Writer, job: Conversion) -> int:
    out = CountedFile(None)
    sink = writer.open(out)
    sink.write(writer.encode(job.probe))
    sink.close()
    return out.bytes


def _check_room(folder: Path, wanted: float) -> None:
    free = shutil.disk_usage(folder).free
    if wanted > free:
        raise DataError(
            f"about {size_words(wanted)} are to be written, but {size_words(free)} are free",
            where=str(folder),
            do="make room, or choose another folder",
        )
