"""Inspection of files: formats, rows, classes, bad rows and a schema."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flatout.data.batches.form import Leaf
from flatout.data.conversion.job import Conversion, job_of, pieces_of
from flatout.data.conversion.progress import progress as showing
from flatout.data.inspection.column_counts import ColumnCounts, count, percentiles
from flatout.data.inspection.inspected import ColumnFacts, Report
from flatout.data.pipeline import Pipeline
from flatout.data.randomness import order
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import File, Paths, find
from flatout.data.reading.schema import Column, Schema
from flatout.data.sources.formats import NO_LIMIT, SKIPPING, guess, open_files
from flatout.data.sources.images.image_bytes import ImageBytes
from flatout.errors import DataError
from flatout.words import size_words

# Height and width to which images of several sizes are resized, if the user names none.
USUAL_SIZE = 224
# Images that are decoded for the report; decoding all would take too long.
_FEW = 512
# Decoded bytes of a block.
_BLOCK_BYTES = 16 << 20
# _MANY_FILES: number of files from which on a note advises to join small files. _SMALL_FILE: mean
# size in bytes below which files are small.
_MANY_FILES, _SMALL_FILE = 16, 1 << 20


def inspect(
    paths: Paths,
    format: str | None = None,
    *,
    progress: bool = True,
    **options: Any,
) -> Report:
    """Read all rows of files and report on them. Bad rows are counted, and raise no error.

    For images, all headers are read and some images are decoded. Where bad rows cannot be skipped,
    as in Parquet, the report ends at the first bad row.

    Args:
        paths: path, glob pattern or URL, or a list of these, or folders of images or rows.
        format: one of `formats.FORMATS`; None guesses from names and first bytes of the files.
        progress: show progress on standard error, from the second second on.
        **options: options of the format's function, such as `delimiter=";"` or `target="price"` of
            CSV.

    Raises:
        DataError: there are no such files, their format is not known, it has no such option, or
            no row is good.
    """
    kind = format or guess(paths)
    images = None
    if kind == "images":
        if options:
            raise DataError(f"a look at images has no option {next(iter(options))!r}")
        images = ImageBytes(paths, ErrorPolicy("skip", NO_LIMIT))
        pipeline = open_found(images, paths, "skip", NO_LIMIT)
    else:
        pipeline = open_with_bad_rows(paths, kind, options=options)
    stored = _Stored.of(kind, paths, images)
    counts, bad = ColumnCounts(), ""
    schema: Schema | None = getattr(pipeline.origin, "schema", None)
    columns = () if schema is None else schema.columns
    try:
        job = job_of(pipeline, None, None)
        columns = columns or job.schema.columns
        _count(job, images, counts, progress)
    except DataError as error:
        if kind in SKIPPING:
            raise
        bad = " ".join(str(error).split())
    return _report(kind, stored, pipeline, images, columns, counts, bad)


def open_with_bad_rows(paths: Paths, kind: str, **given: Any) -> Pipeline:
    """Open files of a format without their bad rows, where the format can leave these out."""
    on_error: Any = "skip" if kind in SKIPPING else "fail"
    return open_files(
        paths, kind, on_error=on_error, max_errors=NO_LIMIT, without_text=True, **given
    )


class _Stored(NamedTuple):
    """Sizes of files, as stored and after decompression, and the number of compressed files."""

    sizes: list[int]
    unpacked: list[int]
    packed: int

    @classmethod
    def of(cls, kind: str, paths: Paths, images: ImageBytes | None) -> _Stored:
        if images is not None:
            sizes = images.headers["bytes"].tolist()
            return cls(sizes, sizes, 0)
        if kind == "rows":
            given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
            inside = (entry for item in given for entry in os.scandir(os.path.expanduser(item)))
            sizes = [entry.stat().st_size for entry in inside]
            return cls(sizes, sizes, 0)
        files = find(paths)
        sizes = [_stored_size(file) for file in files]
        unpacked = [file.size for file in files]
        packed = sum(a != b for a, b in zip(sizes, unpacked, strict=True))
        return cls(sizes, unpacked, packed)


def _stored_size(file: File) -> int:
    with suppress(OSError):
        return os.stat(file.name).st_size
    return file.size


def _count(
    job: Conversion, images: ImageBytes | None, counts: ColumnCounts, progress: bool
) -> None:
    numbers = job.numbers
    target = job.samples.form.targets
    name = target.column if isinstance(target, Leaf) else None
    if images is not None:
        numbers = np.sort(order(len(numbers), 0, 0)[:_FEW])
    pieces = pieces_of([len(numbers)], job.probe, _BLOCK_BYTES)
    looking = replace(job, numbers=numbers).make(pieces, lambda block: count(block, name))
    with showing("looking at rows", len(numbers), progress) as tell:
        for counted in looking:
            if counted is not None:
                counts.add(counted)
            tell(counts.rows, "")
    if images is not None:
        counts.only_labels(images.targets())


def _report(
    kind: str,
    stored: _Stored,
    pipeline: Pipeline,
    images: ImageBytes | None,
    columns: Sequence[Column],
    counts: ColumnCounts,
    bad: str,
) -> Report:
    origin: Any = pipeline.origin
    schema = getattr(origin, "schema", None)
    result = [_column(column, counts, _base_of(schema)) for column in columns]
    targets = [column for column in columns if column.role == "target"]
    index = getattr(origin, "index", None)
    facts = {} if index is None else index.facts
    skipped, notes = _skipped(
        [*(images.notes() if images else ()), *getattr(origin, "notes", list)()]
    )
    if images is not None:
        notes.append(size_note(images))
    mean = sum(stored.unpacked) / len(stored.sizes)
    if images is None and len(stored.sizes) >= _MANY_FILES and mean < _SMALL_FILE:
        notes.append(
            f"{len(stored.sizes):,} files of {size_words(mean)} in the mean, each of which has to "
            "be opened: `flatout data convert` writes one"
        )
    if counts.sorted_by_class:
        notes.append(
            "the rows are sorted by class: without .shuffle(seed) batches hold one class each"
        )
    names = () if schema is None else schema.classes or ()
    rows = pipeline.batch(1).samples
    assert rows is not None
    return Report(
        format=kind,
        files=len(stored.sizes),
        bytes=sum(stored.sizes),
        packed=stored.packed,
        unpacked_bytes=sum(stored.unpacked),
        rows=rows,
        looked_at=counts.rows,
        columns=result,
        values_a_row=(int(facts["shortest"]), int(facts["longest"]))
        if "shortest" in facts
        else None,
        max_id=int(facts["highest"]) if "highest" in facts else _max_id(result),
        target=targets[0].name if len(targets) == 1 else None,
        classes=_classes(counts, names) if targets else None,
        target_mean=counts.mean if targets else None,
        bad_rows=skipped.rows + bool(bad),
        bad=bad or skipped.words,
        schema=schema,
        notes=notes,
    )


class _Skipped(NamedTuple):
    rows: int
    words: str


def _skipped(notes: Sequence[str]) -> tuple[_Skipped, list[str]]:
    result = _Skipped(0, "")
    others = []
    for note in dict.fromkeys(notes):
        match = re.fullmatch(r"([\d,]+) bad rows? skipped: (.*)", note, re.DOTALL)
        if match is None:
            others.append(note)
        else:
            result = _Skipped(int(match[1].replace(",", "")), match[2])
    return result, others


def _column(column: Column, counts: ColumnCounts, base: int) -> ColumnFacts:
    part = counts.columns.get(column.name)
    empty = part is None or part.low > part.high
    base = base if column.role == "input" and column.dtype == "int64" else 0
    lengths = percentiles(part.lengths) if part is not None and part.lengths else None
    return ColumnFacts(
        name=column.name,
        kind=column.words.removeprefix(column.name + " "),
        role=column.role,
        low=None if empty or part is None else part.low + base,
        high=None if empty or part is None else part.high + base,
        lengths=lengths,
    )


def _max_id(columns: Sequence[ColumnFacts]) -> int | None:
    highs = [
        column.high
        for column in columns
        if column.role == "input" and column.kind.startswith("int64 ") and column.high is not None
    ]
    return int(max(highs)) if highs else None


def _classes(counts: ColumnCounts, names: Sequence[str]) -> dict[str, int] | None:
    classes = counts.classes
    if classes is None:
        return None
    return {
        names[label] if 0 <= label < len(names) else str(label): n for label, n in classes.items()
    }


def _base_of(schema: Schema | None) -> int:
    is_libsvm = schema is not None and schema.format == "libsvm"
    return int(schema.options.get("base", 0)) if schema is not None and is_libsvm else 0


def open_images_of_any_size(paths: Paths, on_error: OnError, max_errors: int) -> Pipeline:
    """Return decoded images, with labels if there are class folders, resized if sizes differ."""
    return open_found(
        ImageBytes(paths, ErrorPolicy(on_error, max_errors)), paths, on_error, max_errors
    )


def open_found(images: ImageBytes, paths: Paths, on_error: OnError, max_errors: int) -> Pipeline:
    import flatout.data

    return flatout.data.images(
        paths,
        size=USUAL_SIZE if len(sizes_of(images)) > 1 else None,
        labels=bool(images.classes),
        on_error=on_error,
        max_errors=max_errors,
    )


def sizes_of(images: ImageBytes) -> dict[tuple[int, int], int]:
    """Return the number of images of each height and width, the most frequent size first."""
    pairs = np.stack([images.headers["height"], images.headers["width"]], axis=1)
    sizes, counts = np.unique(pairs, axis=0, return_counts=True)
    turn = np.argsort(-counts, kind="stable")
    return {(int(h), int(w)): int(n) for (h, w), n in zip(sizes[turn], counts[turn], strict=True)}


def size_note(images: ImageBytes) -> str:
    sizes = sizes_of(images)
    (height, width), count = next(iter(sizes.items()))
    if len(sizes) == 1:
        return f"all images are {height}x{width}"
    small, *_, large = sorted(sizes, key=lambda size: size[0] * size[1])
    return (
        f"{len(sizes):,} sizes of images, {small[0]}x{small[1]} to {large[0]}x{large[1]}, most "
        f"often {height}x{width} ({count:,}); the schema resizes them to "
        f"{USUAL_SIZE}x{USUAL_SIZE}, edit it or pass size="
    )
