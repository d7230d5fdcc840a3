"""How fast an input is, measured: what `flatout data bench` shows, and what advice rests on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np

from flatout.cache_folder import cache_folder, kind_folder
from flatout.data.block import Block, Numbers
from flatout.data.buffers import Buffers
from flatout.data.conversion.job import Conversion, job_of
from flatout.data.conversion.passes import Piece
from flatout.data.conversion.writers.rows import rows_schema
from flatout.data.execution.row_folder import Filling
from flatout.data.execution.row_store import layout_of, row_bytes
from flatout.data.execution.samples import Costs, Samples
from flatout.data.files import Paths
from flatout.data.formats import NO_LIMIT, SKIPPING, guess, open_files, schema_format
from flatout.data.inspection.image_report import open_images_of_any_size
from flatout.data.order import order
from flatout.data.origins import is_chunks
from flatout.data.pipeline import Pipeline
from flatout.data.schema import Given
from flatout.data.sources.rows import FolderRows
from flatout.errors import DataError
from flatout.measure import usable_cpus
from flatout.words import rounded

_BATCH = 4096
# Of small data, batches are smaller: threads begin again in each epoch.
_BATCHES = 4
# What a row cache is made of to be measured: at most so many bytes, rows, and seconds of making.
_SAMPLE_BYTES, _SAMPLE_ROWS, _SAMPLE_S = 64 << 20, 100_000, 1.0
_MAKING_ROWS = 1024
# Batches that do not count.
_WARM = 2


@dataclass(frozen=True)
class Sample:
    """Some rows of a source, as a row cache.

    Attributes:
        rows: how many.
        row_bytes: that one takes decoded.
        folder: the row cache; it goes when the measuring is over.
    """

    rows: int
    row_bytes: float
    folder: Path


@contextmanager
def row_cache_of(
    job: Conversion, seconds: float = _SAMPLE_S, making_rows: int = _MAKING_ROWS
) -> Iterator[Sample]:
    """Return a row cache of rows drawn from all of them, as many as fit into some seconds.

    If rows cost more out of order, the first rows are taken instead.
    """
    numbers = job.numbers
    if job.samples.random:
        numbers = numbers[order(len(numbers), 0, 0)]
    each = row_bytes(job.probe)
    most = int(min(len(numbers), _SAMPLE_ROWS, max(making_rows, _SAMPLE_BYTES // each)))
    pieces = [
        Piece(0, start, min(start + making_rows, most)) for start in range(0, most, making_rows)
    ]
    blocks: list[Block] = []
    until = time.perf_counter() + seconds
    with closing(replace(job, numbers=numbers).make(pieces, lambda block: block)) as made:
        for block in made:
            blocks.append(block)
            if time.perf_counter() > until:
                break
    rows = sum(map(len, blocks))
    with tempfile.TemporaryDirectory(dir=kind_folder("samples")) as place:
        target = Path(place) / "sample.rows"
        with closing(Filling(target, layout_of(job.probe.columns), rows, "sample")) as filling:
            start = 0
            for block in blocks:
                filling.put(np.arange(start, start + len(block)), dict(block.columns))
                start += len(block)
            filling.finish(None, {"schema": rows_schema(job.schema).dumps()})
        yield Sample(rows, each, target)


def rows_per_s(samples: Samples, numbers: Numbers, batch: int, seconds: float) -> float:
    """Rows that one thread makes in a second, batch after batch."""
    buffers, costs = Buffers(), Costs()
    starts = cycle(range(0, len(numbers), batch))
    samples.make(numbers[: next(starts) + batch], buffers, 0, costs)  # opens files, fills pools
    began, made = time.perf_counter(), 0
    for start in starts:
        made += len(samples.make(numbers[start : start + batch], buffers, 0, costs))
        passed = time.perf_counter() - began
        if passed > seconds:
            return made / passed
    raise AssertionError


def opening_s(paths: list[str], most: int = 200) -> float:
    """Seconds that it takes to open a file and read its first bytes, in the middle of some."""
    chosen = [paths[at] for at in np.unique(np.linspace(0, len(paths) - 1, most).astype(int))]
    times = []
    for path in chosen:
        began = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            file.read(4096)
        times.append(time.perf_counter() - began)
    return float(np.median(times))


@dataclass(frozen=True)
class ReadingRate:
    """One way of reading, measured.

    Attributes:
        what: is read.
        threads: that made batches.
        rows_per_s: in batches of tensors.
        batches: over which it was measured.
        stages: milliseconds of one thread per batch, by stage.
    """

    what: str
    threads: int
    rows_per_s: float
    batches: int
    stages: dict[str, float]


@dataclass(frozen=True)
class Bench:
    """How fast an input is.

    Attributes:
        describe: what was read.
        rows: of all.
        batch_size: rows of a batch.
        order: in which rows were read, in words.
        open_s: seconds until it was known how many rows there are.
        index: whether an index was built for that, "built", "found" or "none".
        sample_rows: rows of the row cache.
        measured: the ways of reading.
        notes: what else there is to know.
    """

    describe: str
    rows: int
    batch_size: int
    order: str
    open_s: float
    index: str
    sample_rows: int
    measured: list[ReadingRate]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    def headline(self) -> str:
        """What was read, and how long it took to open it."""
        index = {"built": ", its index built", "found": ", its index found", "none": ""}[self.index]
        return (
            f"{self.describe}: opened in {self.open_s:.2f} s{index}; batches of "
            f"{self.batch_size:,}, {self.order}"
        )

    def table(self) -> list[tuple[str, str, str, str, str]]:
        """What, threads, rows/s, speed against the first, and milliseconds by stage."""
        first = self.measured[0].rows_per_s
        return [
            (
                measurement.what,
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
    """Measure the pipeline on these files: with one thread, with all, and from a row cache.

    What is read once stays in the page cache, so this is the rate of epochs after the first one.
    Bad rows are skipped, where the format can.

    Args:
        paths: as `files.find` takes them, or folders of images or rows.
        format: one of `formats.FORMATS`; None takes the schema's, or guesses.
        schema: a Schema, the path of one in TOML, or a dict.
        batch_size: rows of a batch; None means 4096, or a quarter of small data.
        seconds: for each way of reading.

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
    ways = {"these files": pipeline if in_order else pipeline.shuffle(seed=0)}
    with row_cache_of(job_of(pipeline, None, None)) as sample:
        if kind != "rows":
            ways["a row cache"] = Pipeline(FolderRows(sample.folder)).shuffle(seed=0)
        measured = [
            _measure(name, way.batch(min(size, _rows(way))), threads, seconds)
            for name, way in ways.items()
            for threads in sorted({1, usable_cpus()})
        ]
    return Bench(
        describe=pipeline.describe().removesuffix(", in the given order"),
        rows=rows,
        batch_size=size,
        order="in their order, being decoded in chunks" if in_order else "shuffled",
        open_s=open_s,
        index="built" if built else "found" if hasattr(pipeline.origin, "index") else "none",
        sample_rows=sample.rows,
        measured=measured,
        notes=list(getattr(pipeline.origin, "notes", list)()),
    )


def _opened(paths: Paths, kind: str, schema: Given | None) -> Pipeline:
    if kind == "images" and schema is None:
        return open_images_of_any_size(paths, "skip", NO_LIMIT)
    on_error: Any = "skip" if kind in SKIPPING else "fail"
    return open_files(
        paths, kind, schema=schema, on_error=on_error, max_errors=NO_LIMIT, without_text=True
    )


def _indexes() -> set[str]:
    folder = cache_folder() / "index"
    return {path.name for path in folder.glob("*.npz")}


def _rows(pipeline: Pipeline) -> int:
    rows = pipeline.batch(1).samples
    assert rows is not None
    return rows


def _measure(what: str, pipeline: Pipeline, threads: int, seconds: float) -> ReadingRate:
    running = pipeline.options(threads=threads)
    made, rows, began, passed = -_WARM, 0, 0.0, 0.0
    for epoch in count():
        for batch in running.batches(epoch):
            made += 1
            if made <= 0:  # opens files, fills pools
                began, rows = time.perf_counter(), 0
                continue
            rows += batch.size
            passed = time.perf_counter() - began
            if passed > seconds:
                stages = running.explanation().stages
                return ReadingRate(what, threads, rows / passed, made, stages)
    raise AssertionError
