"""Program of a pipeline over a stream, whose rows come in sequence, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter_ns as clock

from flatout.data.batches.batch import Batch
from flatout.data.batches.form import Form, form_of
from flatout.data.execution.program import Functions
from flatout.data.execution.samples import Costs, Samples
from flatout.data.reading.block import Block, cut
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.origins import Stream
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.errors import DataError


class StreamProgram:
    def __init__(
        self,
        stream: Stream,
        samples: Samples,
        steps: Sequence[Callable[[Iterator[Block], int], Iterator[Block]]],
        functions: Functions,
        size: Callable[[int], int],
        *,
        drop_last: bool,
        times: int,
        apart: bool,
    ) -> None:
        self.stream = stream
        self.costs = Costs()
        self.tuner = Tuner(1, threads=1)
        self._buffers = Buffers()
        self._samples, self._steps, self._functions = samples, steps, functions
        self._size, self._drop_last = size, drop_last
        self._times, self._apart = times, apart

    def batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
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
            # Closing the stream frees a thread that waits for a silent writer.
            getattr(self.stream, "close", lambda: None)()
            ahead.close()

    def _batches(self, epoch: int) -> Iterator[Batch]:
        turns = range(epoch * self._times, (epoch + 1) * self._times)
        for some in ([turn] for turn in turns) if self._apart else [turns]:
            yield from self._made(self._rows(some))

    def _made(self, rows: Iterator[Block]) -> Iterator[Batch]:
        for at, block in enumerate(cut(rows, self._size)):
            if len(block) < self._size(at) and self._drop_last:
                return
            start = clock()
            batch = self._samples.form.batch(block, self._buffers)
            self.costs.add("batch", clock() - start)
            self.costs.batches += 1
            yield batch

    def _rows(self, turns: Iterable[int]) -> Iterator[Block]:
        for turn in turns:
            blocks = self._timed(self.stream.blocks(turn, self._buffers))
            for step in self._steps:
                blocks = step(blocks, turn)
            yield from blocks

    def _timed(self, blocks: Iterator[Block]) -> Iterator[Block]:
        while True:
            start = clock()
            block = next(blocks, None)
            self.costs.add("read and decode", clock() - start)
            if block is None:
                return
            yield block


class StreamRows:
    random = False
    name = "decode"

    def __init__(self, stream: Stream) -> None:
        self.rows = 0
        self.form: Form = form_of(stream.schema)

    def where(self, number: int) -> str:
        return f"row {number:,} of the stream"
