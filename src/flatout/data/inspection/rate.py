"""Measured rate of an input: `flatout data bench` shows it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from flatout.cache_folder import cache_folder
from flatout.data.inspection.inspect import open_images_of_any_size, open_with_bad_rows
from flatout.data.pipeline import Pipeline
from flatout.data.reading.files import Paths
from flatout.data.reading.origins import is_chunks
from flatout.data.reading.schema import Given
from flatout.data.sources.formats import NO_LIMIT, guess, schema_format
from flatout.errors import DataError
from flatout.measure import usable_cpus
from flatout.words import rounded

# Rows of a batch, if the user names none and data are large.
_BATCH = 4096
# Minimum number of batches of an epoch: small data have smaller batches, as threads start again in
# each epoch.
_BATCHES = 4
# First batches that are not measured.
_WARM = 2


@dataclass(frozen=True)
class ReadingRate:
    """The rate of some threads.

    Attributes:
        threads: number of threads.
        rows_per_s: rows read per second.
        batches: number of measured batches.
        stages: milliseconds of one thread per batch, by stage.
    """

    threads: int
    rows_per_s: float
    batches: int
    stages: dict[str, float]


@dataclass(frozen=True)
class Bench:
    """Rate of an input.

    Attributes:
        describe: description of the input, for the user.
        rows: number of rows.
        batch_size: number of rows of a batch.
        order: order in which rows were read, in words.
        open_s: seconds to open the input and count its rows.
        index: "built" or "found" for an index of the rows, or "none".
        measured: rate of each number of threads.
        notes: lines for the user.
    """

    describe: str
    rows: int
    batch_size: int
    order: str
    open_s: float
    index: str
    measured: list[ReadingRate]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def headline(self) -> str:
        index = {"built": ", its index built", "found": ", its index found", "none": ""}[self.index]
        return (
            f"{self.describe}: opened in {self.open_s:.2f} s{index}; batches of "
            f"{self.batch_size:,}, {self.order}"
        )

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return threads, rows/s, speedup over the first line, and milliseconds by stage."""
        first = self.measured[0].rows_per_s
        return [
            (
                str(measurement.threads),
                f"{measurement.rows_per_s:,.0f}",
                f"{measurement.rows_per_s / first:.2f}x",
                ", ".join(f"{name} {rounded(ms)}" for name, ms in measurement.stages.items()),
            )
            for measurement in self.measured
        ]


def bench(
    paths: Paths,
    format: str | None = None,
    *,
    schema: Given | None = None,
    batch_size: int | None = None,
    seconds: float = 2.0,
) -> Bench:
    """Measure the pipeline on these files, with one thread and with all.

    Files that were read once stay in the page cache, so this is the rate of epochs after the first
    one. Bad rows are skipped, where the format can.

    Args:
        paths: path, glob pattern or URL, or a list of these, or folders of images or rows.
        format: one of `formats.FORMATS`; None means the schema's format, or a guess from the files.
        schema: a Schema, the path of one in TOML, or a dict.
        batch_size: number of rows of a batch; None means 4096, or a quarter of small data.
        seconds: time to measure each number of threads.

    Raises:
        DataError: the files cannot be read, or the batch is larger than the data.
    """
    before, began = _indexes(), time.perf_counter()
    kind = format or schema_format(schema) or guess(paths)
    pipeline = _opened(paths, kind, schema)
    rows = _rows(pipeline)
    open_s, built = time.perf_counter() - began, _indexes() - before
    size = min(_BATCH, max(1, rows // _BATCHES)) if batch_size is None else batch_size
    if not 1 <= size <= rows:
        raise DataError(f"batch_size: expected 1 to {rows:,}, the rows there are; found {size!r}")
    in_order = is_chunks(pipeline.origin)
    way = (pipeline if in_order else pipeline.shuffle(seed=0)).batch(size)
    measured = [_measure(way, threads, seconds) for threads in sorted({1, usable_cpus()})]
    return Bench(
        describe=pipeline.describe().removesuffix(", in the given order"),
        rows=rows,
        batch_size=size,
        order="in their order, being decoded in chunks" if in_order else "shuffled",
        open_s=open_s,
        index="built" if built else "found" if hasattr(pipeline.origin, "index") else "none",
        measured=measured,
        notes=list(getattr(pipeline.origin, "notes", list)()),
    )


def _opened(paths: Paths, kind: str, schema: Given | None) -> Pipeline:
    if kind == "images" and schema is None:
        return open_images_of_any_size(paths, "skip", NO_LIMIT)
    return open_with_bad_rows(paths, kind, schema=schema)


def _indexes() -> set[str]:
    folder = cache_folder() / "index"
    return {path.name for path in folder.glob("*.npz")}


def _rows(pipeline: Pipeline) -> int:
    rows = pipeline.batch(1).samples
    assert rows is not None
    return rows


def _measure(pipeline: Pipeline, threads: int, seconds: float) -> ReadingRate:
    running = pipeline.options(threads=threads)
    made, rows, began, passed = -_WARM, 0, 0.0, 0.0
    for epoch in count():
        for batch in running.batches(epoch):
            made += 1
            if made <= 0:  # the first batches open files and fill pools
                began, rows = time.perf_counter(), 0
                continue
            rows += batch.size
            passed = time.perf_counter() - began
            if passed > seconds:
                stages = running.explanation().stages
                return ReadingRate(threads, rows / passed, made, stages)
    raise AssertionError
