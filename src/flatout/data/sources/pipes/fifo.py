"""Pipes and standard input: rows that come in sequence, once per pass."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias

import numpy as np

from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import Changes
from flatout.data.reading.decoder import Encoded
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.origins import Gather, alone
from flatout.data.reading.schema import Given, Schema
from flatout.data.sources.pipes.fifo_formats import WORDS, Format, Wrap, decoder_of, stream_schema
from flatout.data.sources.pipes.framing import LONGEST_RECORD, pieces
from flatout.data.sources.pipes.pipe import STANDARD_INPUT, Pipe
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.errors import DataError
from flatout.processes import machine
from flatout.world import Place, place

PipePath: TypeAlias = "str | os.PathLike[str] | TextIO"
Presharded: TypeAlias = Literal["rank", "local_rank", "node"] | None

# Maximum number of rows of text that are decoded at a time.
_BLOCK_ROWS = 4096


class PipePart(NamedTuple):
    """Rows of one pipe.

    Attributes:
        block: the decoded rows of this reader.
        records: number of records that were read, including records of other readers' rows.
        ends_turn: whether the next rows come from another pipe.
    """

    block: Block
    records: int
    ends_turn: bool


class FifoStream:
    """Rows of pipes. Follows `flatout.data.reading.origins.Stream`.

    Attributes:
        rows: the number of rows of this reader in a pass; None if it is unknown.
    """

    def __init__(
        self,
        paths: Sequence[str],
        schema: Schema,
        wrap: Wrap | None = None,
        *,
        rows: int | None = None,
        share: tuple[int, int] = (0, 1),
        on_error: OnError = "fail",
        max_errors: int = 100,
        timeout_s: float | None = None,
        longest: int = LONGEST_RECORD,
        block_bytes: int = 16 << 20,
        turn: int = 256,
    ) -> None:
        self.schema = schema
        # With several pipes, the number of rows in each is not known.
        is_known = rows is not None and (share[1] == 1 or len(paths) == 1)
        self.rows = len(range(share[0], rows or 0, share[1])) if is_known else None
        self._come, self._share = rows, share
        self._paths, self._wrap = list(paths), wrap
        self._on_error, self._max_errors = on_error, max_errors
        self._timeout_s, self._longest = timeout_s, longest
        self._policy, self._turn = ErrorPolicy(on_error, max_errors), turn
        self._changes = Changes()
        self._block = max(1, min(_BLOCK_ROWS, block_bytes // max(1, _row_bytes(schema))))
        self._passes = 0
        self._open: list[Pipe] = []
        self._left: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": []}

    @property
    def digest(self) -> str:
        """Digest over the facts known before rows come; names of pipes do not count."""
        words = f"{len(self._paths)} {self._wrap} {self._come}\n{self.schema.dumps()}"
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    def blocks(self, epoch: int, buffers: Buffers) -> Iterator[Block]:
        """Yield the rows of the next pass; `numbers` count from 0.

        A pass opens each pipe again. Passes are counted from the first one of this process, not by
        `epoch`, as a writer that makes a new FIFO for each pass counts them.
        """
        turn, self._passes = self._passes, self._passes + 1
        policy = self._policy = ErrorPolicy(self._on_error, self._max_errors)
        pipes = self._open = [Pipe(path, turn, timeout_s=self._timeout_s) for path in self._paths]
        try:
            # Open all pipes before reading: a writer may wait for the reader of any pipe.
            for pipe in pipes:
                pipe.open()
                self._check_new(pipe, turn)
            with closing(self._parts(pipes, policy, buffers)) as parts:
                yield from self._numbered(parts)
        finally:
            for pipe in pipes:
                pipe.stop()
                pipe.close()

    def _check_new(self, pipe: Pipe, turn: int) -> None:
        if pipe.name in self._left:
            raise DataError(
                f"pass {turn} was left before its end, and what is still written of it cannot be "
                f"told from pass {turn + 1}",
                where=pipe.name,
                do="give each pass its own FIFO (PATH_0, PATH_1, ...), or write as many rows "
                "to each rank's",
            )

    def leave(self) -> None:
        """Record that the present pass ends early, while its writers are still writing."""
        self._left.update(pipe.name for pipe in self._open)

    def places(self) -> list[str]:
        """Return a text for each pipe; only two readers of the same pipe have equal texts."""
        return [f"{machine()} {_real(path)}" for path in self._paths]

    def _numbered(self, parts: Iterator[PipePart]) -> Iterator[Block]:
        records = good = 0
        for part in parts:
            records += part.records
            if self._come is not None and records > self._come:
                raise DataError(
                    f"expected {self._come:,} rows in a pass, found more",
                    where=self._names,
                    do="correct rows; or the writer of the next pass came before this one ended: "
                    "give each pass its own FIFO (PATH_0, PATH_1, ...)",
                )
            if len(part.block):
                yield Block(part.block.columns, np.arange(good, good + len(part.block)))
                good += len(part.block)
        if self._come is not None and records < self._come:
            raise DataError(
                f"expected {self._come:,} rows in a pass, found {records:,}: the writer has gone",
                where=self._names,
                do="look why the writer ended early, or correct rows",
            )
        if records == 0:
            raise DataError("expected rows, found the end of the stream", where=self._names)

    def _parts(
        self, pipes: Sequence[Pipe], policy: ErrorPolicy, buffers: Buffers
    ) -> Generator[PipePart, None, None]:
        if len(pipes) == 1:
            yield from self._rows_of(pipes[0], policy, buffers)
            return
        readers = [_in_a_thread(self._rows_of(pipe, policy, buffers)) for pipe in pipes]
        left = list(map(iter, readers))
        try:
            while left:
                for reader in list(left):
                    more = yield from _turn(reader)
                    if not more:
                        left.remove(reader)
        finally:
            for pipe, thread in zip(pipes, readers, strict=True):
                pipe.stop()
                thread.close()

    def _rows_of(self, pipe: Pipe, policy: ErrorPolicy, buffers: Buffers) -> Iterator[PipePart]:
        decoder = decoder_of(self.schema, self._wrap, pipe.name, self._changes)
        text = getattr(decoder, "text", True)
        # With a single pipe, reading never switches to another pipe.
        turn = left = self._turn if len(self._paths) > 1 else sys.maxsize
        rows_seen = 0
        for piece in pieces(pipe, decoder.split, text=text, longest=self._longest):
            at = 0
            while at < len(piece.starts):
                rows = slice(at, min(at + self._block, at + left, len(piece.starts)))
                index, readers = self._share
                numbers = np.arange(rows.start + (index - rows_seen) % readers, rows.stop, readers)
                encoded = Encoded(
                    piece.buffer,
                    piece.starts[numbers],
                    piece.ends[numbers],
                    numbers,
                    lambda row, byte, of=piece: of.where(pipe.name, byte, text),  # type: ignore[misc]
                )
                block = decoder.decode(encoded, None, buffers, policy)
                count = rows.stop - rows.start
                rows_seen, left = rows_seen + count, left - count
                yield PipePart(block, count, left == 0)
                left, at = left or turn, rows.stop

    def close(self) -> None:
        for pipe in self._open:
            pipe.stop()

    @property
    def _names(self) -> str:
        names = ["standard input" if p == STANDARD_INPUT else p for p in self._paths]
        return ", ".join(names)

    def describe(self) -> str:
        count = "" if self._come is None else f", {self._come:,} a pass"
        wrap = " in RecordIO" if self._wrap else ""
        return f"{WORDS[self.schema.format]} rows{wrap} of {self._names}{count}"

    def skipped(self, gather: Gather = alone) -> list[str]:
        changed = self._changes.new_notes(gather)
        if self._on_error != "skip":
            return changed
        return [*changed, *(line for lines in gather(self._policy.new_notes()) for line in lines)]

    def notes(self) -> list[str]:
        return [*self._changes.notes(), *self._policy.notes()]


def _real(path: str) -> str:
    if path != STANDARD_INPUT:
        return os.path.realpath(path)
    with suppress(OSError):
        return os.readlink("/proc/self/fd/0")
    return "standard input"


def _row_bytes(schema: Schema) -> int:
    return sum(
        math.prod(column.shape) * column.numpy_dtype.itemsize
        for column in schema.columns
        if not column.ragged
    )


def _in_a_thread(parts: Iterator[PipePart]) -> Ahead[PipePart | None]:
    return Ahead(lambda at: next(parts, None), 0, 2**62, Tuner(1, threads=1))


def _turn(reader: Iterator[PipePart | None]) -> Generator[PipePart, None, bool]:
    while (part := next(reader)) is not None:
        yield part
        if part.ends_turn:
            return True
    return False


def fifo(
    path: PipePath | Sequence[PipePath],
    *,
    format: Format = "libsvm",
    schema: Given | None = None,
    wrap: Wrap | None = None,
    rows: int | None = None,
    presharded: Presharded = "rank",
    on_error: OnError = "fail",
    max_errors: int = 100,
    timeout_s: float | None = None,
    max_record_bytes: int = LONGEST_RECORD,
) -> Pipeline:
    """Read rows from a FIFO or from standard input, decoded like rows of files.

    Each epoch reads to the end of the stream. The next epoch opens the FIFO again and waits for its
    writer. If `path` does not exist, passes read the FIFOs `path_0`, `path_1`, ..., as Amazon
    SageMaker's Pipe mode makes them for a channel. Standard input can be read once.

    A pipe has one reader. A second reader, in this process or elsewhere, is refused.

    Args:
        path: a FIFO, the start of the names of several, or "-" or `sys.stdin` for standard input.
            For a list of pipes, a thread reads each pipe, in turns of 256 rows. So the order does
            not depend on the speed of the pipes.
        format: "libsvm", "tfrecord", "criteo", "csv", or "recordio" for SageMaker's Record messages
            in RecordIO. Options of a format are those of its schema.
        schema: a Schema, the path of one in TOML, or a dict; only Criteo needs no schema.
        wrap: "recordio" if the rows come in RecordIO records, as by SageMaker's RecordWrapperType:
            whole files, or one Example each.
        rows: number of rows in a pass, over all pipes. Fewer or more are then an error. Without it,
            a writer that dies between two rows looks like one that has finished.
        presharded: statement of how the rows are split over the pipes. "rank": this rank gets all
            rows of its pipe. "local_rank": the ranks of this number on every node get the same
            rows. "node": all ranks of this node get the same rows. None: all ranks get the same
            rows. Of n ranks that get the same rows, each keeps every n-th row.
        on_error: "fail", or "skip" bad rows, in each pass.
        max_errors: maximum number of rows to skip in a pass.
        timeout_s: longest time without a byte; None waits forever. In both cases, a line on stderr
            names the pipe that is waited for.
        max_record_bytes: longest record; it limits the memory for reading.

    Raises:
        DataError: here or while reading. The error names pipe and line or byte, and what was
            expected and found. A stream that ends within a record is an error with any `on_error`.
    """
    several = isinstance(path, Sequence) and not isinstance(path, str)
    paths = [_name_of(item) for item in (path if several else [path])]  # type: ignore[union-attr]
    if not paths or len(set(paths)) < len(paths):
        raise DataError(f"expected pipes that differ, found {paths}")
    if presharded not in ("rank", "local_rank", "node", None):
        raise DataError(
            f"presharded: expected 'rank', 'local_rank', 'node' or None, found {presharded!r}"
        )
    _check("rows", rows, int)
    _check("timeout_s", timeout_s, (int, float))
    _check("max_record_bytes", max_record_bytes, int)
    return Pipeline(
        FifoStream(
            paths,
            stream_schema(format, schema, wrap),
            wrap,
            rows=rows,
            share=_share(presharded, place()),
            on_error=on_error,
            max_errors=max_errors,
            timeout_s=timeout_s,
            longest=max_record_bytes,
        )
    )


def _share(presharded: Presharded, here: Place) -> tuple[int, int]:
    if presharded == "rank":
        return 0, 1
    if presharded == "local_rank":
        return here.node, here.nodes
    if presharded == "node":
        return here.local_rank, here.local_world_size
    return here.rank, here.world_size


def _name_of(path: Any) -> str:
    if path is sys.stdin:
        return STANDARD_INPUT
    if not isinstance(path, (str, os.PathLike)):
        raise DataError(f'expected a path, "-" or sys.stdin, found {type(path).__name__}')
    return os.fspath(path)


def _check(name: str, value: Any, kind: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        raise DataError(f"{name}: expected a number above 0, found {value!r}")
