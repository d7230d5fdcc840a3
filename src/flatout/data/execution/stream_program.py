"""What runs for a pipeline over a stream: rows come one after the other, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter_ns as clock
from typing import Any

import numpy as np

from flatout.console import counted
from flatout.data.batch import Batch as Made
from flatout.data.block import Block, Numbers, join, take
from flatout.data.execution.buffers import Buffers
from flatout.data.execution.parallel import Ahead, Tuner
from flatout.data.execution.program import Functions
from flatout.data.execution.samples import Costs, Mapped
from flatout.data.form import Form, form_of
from flatout.data.order import order
from flatout.data.origins import Stream
from flatout.data.stages import (
    Batch,
    Cache,
    Filter,
    Map,
    Repeat,
    Shard,
    Shuffle,
    Split,
    Stage,
    passes,
    words,
)
from flatout.errors import DataError


class StreamProgram:
    """Batches of a stream, in the order in which its rows come, or shuffled within a window.

    Args:
        stream: where rows come from.
        stages: what was written.
        seed: of functions that draw, where no shuffle gives one.

    Raises:
        DataError: a stage that a stream cannot do.
    """

    def __init__(self, stream: Stream, stages: Sequence[Stage], seed: int) -> None:
        _check(stages, stream)
        self.stream = stream
        self.costs = Costs()
        self.tuner = Tuner(1, threads=1)
        self._buffers = Buffers()
        self._batch = next(stage for stage in stages if isinstance(stage, Batch))
        self._repeat = next((s.times for s in stages if isinstance(s, Repeat)), 1)
        self._passes = passes(stages)
        self._size = self._sizes(next((s for s in stages if isinstance(s, Shard)), None))
        self._shuffle = next((s for s in stages if isinstance(s, Shuffle)), None)
        self.seed = seed if self._shuffle is None else self._shuffle.seed
        at = list(stages).index(self._batch)
        self._functions = Functions(
            tuple(stage.function for stage in stages[at:] if isinstance(stage, Map)), self.seed
        )
        self._steps: list[_Stage] = []
        inner: _Head | Mapped = _Head(stream)
        for stage in stages[:at]:
            if isinstance(stage, Map):
                inner = Mapped(inner, stage.function, self.seed)  # type: ignore[arg-type]
                self._steps.append(inner.apply)
            elif isinstance(stage, Filter):
                self._steps.append(_filter(inner, stage.function))
            elif isinstance(stage, Shuffle):
                self._steps.append(_SHUFFLE)
        self._last = inner

    def batches(self, epoch: int, start_step: int) -> Iterator[Made]:
        """The batches of an epoch; those before `start_step` are read and dropped."""
        made = self._batches(epoch)
        ahead = Ahead(lambda step: next(made, None), 0, 2**62, self.tuner)
        items = iter(ahead)
        try:
            for step, batch in enumerate(items):
                if batch is None:
                    if step < start_step:
                        raise DataError(
                            f"epoch {epoch} ended after {step:,} batches, but the run to resume "
                            f"had taken {start_step:,}: the data has changed"
                        )
                    return
                if step >= start_step:
                    yield self._functions(batch, epoch, step, self.costs)
        finally:
            # A thread that waits for a silent writer is freed by closing what it reads.
            getattr(self.stream, "close", lambda: None)()
            ahead.close()

    def _sizes(self, shard: Shard | None) -> Callable[[int], int]:
        """How many rows batch k of a pass has: of several ranks, its share of the batch size.

        Where the steps of an epoch were agreed on, this rank's rows are spread over them.
        """
        whole = self._batch.size
        if shard is None or shard.world_size == 1:
            return lambda at: whole
        if shard.steps is not None and self.stream.rows is not None:
            rows = self.stream.rows * self._repeat // self._passes
            steps = shard.steps // self._passes
            return lambda at: rows * (at + 1) // steps - rows * at // steps
        share = whole * (shard.rank + 1) // shard.world_size
        share -= whole * shard.rank // shard.world_size
        return lambda at: share

    def _batches(self, epoch: int) -> Iterator[Made]:
        turns = range(epoch * self._repeat, (epoch + 1) * self._repeat)
        for some in ([turn] for turn in turns) if self._passes > 1 else [turns]:
            yield from self._made(self._rows(some))

    def _made(self, rows: Iterator[Block]) -> Iterator[Made]:
        for at, block in enumerate(_cut(rows, self._size)):
            if len(block) < self._size(at) and self._batch.last == "drop":
                return
            start = clock()
            batch = self._last.form.batch(block, self._buffers)
            self.costs.add("batch", clock() - start)
            self.costs.batches += 1
            yield batch

    def _rows(self, turns: Iterable[int]) -> Iterator[Block]:
        for turn in turns:
            blocks = self._timed(self.stream.blocks(turn, self._buffers))
            for step in self._steps:
                blocks = (
                    self._shuffled(blocks, turn)
                    if step is _SHUFFLE
                    else _applied(blocks, step, turn)
                )
            yield from blocks

    def _timed(self, blocks: Iterator[Block]) -> Iterator[Block]:
        while True:
            start = clock()
            block = next(blocks, None)
            self.costs.add("read and decode", clock() - start)
            if block is None:
                return
            yield block

    def _shuffled(self, blocks: Iterator[Block], epoch: int) -> Iterator[Block]:
        """Each time a window's worth of rows has come, one of those here by then goes out.

        Units are counted in rows, not in what came at once: so the order does not depend on timing.
        """
        assert self._shuffle is not None
        assert self._shuffle.window is not None
        window, seed = self._shuffle.window, self._shuffle.seed
        pool: Block | None = None
        for at, unit in enumerate(_cut(blocks, lambda at: window)):
            if pool is None:
                pool = unit
                continue
            both = join([pool, unit])
            turn = order(len(both), seed, (epoch << 32) + at)
            yield take(both, turn[: len(unit)])
            pool = take(both, turn[len(unit) :])
        if pool is not None:
            yield take(pool, order(len(pool), seed, (epoch << 32) + (1 << 31)))


_Stage = Callable[[Block, int], Block]


def _SHUFFLE(block: Block, epoch: int) -> Block:
    """Stands for the shuffle, which looks at more than one block."""
    raise AssertionError


class _Head:
    """The decoded rows, where functions of samples begin."""

    random = False
    name = "decode"

    def __init__(self, stream: Stream) -> None:
        self.rows = 0
        self.form: Form = form_of(stream.schema)

    def where(self, number: int) -> str:
        return f"row {number:,} of the stream"


def _filter(inner: Any, function: Callable[..., Any]) -> _Stage:
    def kept(block: Block, epoch: int) -> Block:
        form = inner.form
        wanted = [bool(function(*form.sample(block, row))) for row in range(len(block))]
        return take(block, np.flatnonzero(wanted))

    return kept


def _applied(blocks: Iterator[Block], step: _Stage, epoch: int) -> Iterator[Block]:
    for block in blocks:
        made = step(block, epoch)
        if len(made):
            yield made


def _cut(blocks: Iterator[Block], size: Callable[[int], int]) -> Iterator[Block]:
    """The same rows in blocks of which block k has `size(k)`; the last may be smaller."""
    waiting: list[Block] = []
    count = at = 0
    for block in blocks:
        waiting.append(block)
        count += len(block)
        if count < size(at):
            continue
        whole, start = join(waiting), 0
        while count - start >= size(at):
            yield take(whole, _range(start, start + size(at)))
            start += size(at)
            at += 1
        waiting = [take(whole, _range(start, count))] if start < count else []
        count -= start
    if count:
        yield join(waiting)


def _range(start: int, stop: int) -> Numbers:
    return np.arange(start, stop, dtype=np.int64)


def _check(stages: Sequence[Stage], stream: Stream) -> None:
    for stage in stages:
        if isinstance(stage, Shuffle) and stage.window is None:
            raise DataError(
                "a stream can be shuffled only among rows that are near each other",
                do="use shuffle(seed, window=10_000), or convert the data to files",
            )
        if isinstance(stage, Batch) and stage.last == "pad":
            raise DataError('batch(last="pad") is not for streams', do='use last="keep" or "drop"')
        if isinstance(stage, Shard):
            _check_shard(stage, stages, stream)
        if isinstance(stage, (Cache, Split)):
            raise DataError(
                f"{words(stage)} wants rows that can be found by number, and a stream has none",
                do="convert the data to files first: flatout data convert",
            )


def _check_shard(shard: Shard, stages: Sequence[Stage], stream: Stream) -> None:
    if shard.by != "batch":
        raise DataError(
            f"shard(by={shard.by!r}) wants rows that can be found by number, and a stream has none",
            do="leave it out: each rank reads a pipe of its own",
        )
    if shard.steps is not None and stream.rows is None:
        raise DataError(
            "shard(steps=...) of a stream wants to know how many rows come",
            do="pass rows= to fifo, or leave steps out: ranks end an epoch together",
        )
    size = next(stage.size for stage in stages if isinstance(stage, Batch))
    if size < shard.world_size:
        raise DataError(
            f"a batch of {counted(size, 'sample')} has none for some of {shard.world_size} ranks, "
            "each of which reads a pipe of its own",
            do="use a larger batch, or fewer ranks",
        )
