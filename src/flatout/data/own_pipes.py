"""Pipes on several ranks: each reads its own pipe, and all end an epoch at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeGuard

from flatout.data.batches.batch import Batch
from flatout.data.pipeline import Pipeline
from flatout.data.reading.origins import is_stream
from flatout.data.source import Source
from flatout.data.stages import Shard, passes, samples_times
from flatout.errors import DataError
from flatout.words import counted


def is_pipe(source: Source) -> TypeGuard[Pipeline]:
    """Return whether a rank reads rows that no other rank can read again."""
    return isinstance(source, Pipeline) and is_stream(source.origin)


def differs_by_rank(source: Source) -> bool:
    """Return True if each rank has its own pipe or its own shard of the rows."""
    return is_pipe(source) or (isinstance(source, Pipeline) and source.has_own_rows)


def samples_of_all(source: Source) -> int | None:
    """Return the number of samples of an epoch over all ranks. All ranks get the same number.

    If ranks have their own rows, the number is rounded up to whole batches.
    """
    if isinstance(source, Pipeline) and source.has_own_rows and source.seekable:
        steps, size = source.steps, source.batch_size
        return None if steps is None or size is None else steps * size
    return source.samples


def own_pipe(
    pipeline: Pipeline, rank: int, world_size: int, gather: Callable[[Any], list[Any]]
) -> Pipeline:
    """Return the pipeline over this rank's pipe, with this rank's part of the batch size.

    If all ranks know the number of rows, each spreads its rows over the same number of steps, so
    that no row is left over. All ranks call this together.

    Args:
        pipeline: the pipeline, equal on all ranks except for its pipe.
        rank: rank of this process.
        world_size: number of ranks.
        gather: returns the values of all ranks, by rank, for the value of this rank.

    Raises:
        DataError: two ranks read one pipe (raised on all ranks), or the stages make no sense.
    """
    if pipeline.of_rank is not None:
        return pipeline.of_rank
    assert is_stream(pipeline.origin)
    shard = pipeline.sharded or Shard(rank, world_size)
    if (shard.rank, shard.world_size) != (rank, world_size):
        raise DataError(
            f"this is rank {rank} of {world_size}, but the pipeline is the part of rank "
            f"{shard.rank} of {shard.world_size}",
            do="write .shard(presharded=True), or leave it out: each rank reads its own pipe",
        )
    places: list[str] = getattr(pipeline.origin, "places", list)()
    known, turns = pipeline.samples, passes(pipeline.stages)
    if known is not None:
        known *= samples_times(pipeline.stages)
    answers = gather({"places": places, "rows": known})
    _check_apart([answer["places"] for answer in answers])
    steps = shard.steps or _steps(
        [answer["rows"] for answer in answers], pipeline.batch_size, turns
    )
    stages = [stage for stage in pipeline.stages if stage is not pipeline.sharded]
    own = pipeline.with_stages((*stages, replace(shard, presharded=True, steps=steps)))
    # Batches of `peek` are gone from the pipe; only the same Pipeline object still has them.
    own.of_rank = pipeline.of_rank = own
    return own


def _check_apart(places: list[list[str]]) -> None:
    readers: dict[str, int] = {}
    for rank, theirs in enumerate(places):
        for place in theirs:
            if place in readers:
                raise DataError(
                    f"ranks {readers[place]} and {rank} read one pipe, and would tear its records "
                    "apart",
                    where=place.rpartition(" ")[2],
                    do="give each rank its own pipe, such as "
                    'fifo(f"train-{place().rank}"), with place of flatout.world',
                )
            readers[place] = rank


def _steps(rows: list[int | None], size: int | None, turns: int) -> int | None:
    known = [count for count in rows if count is not None]
    if size is None or len(known) < len(rows):
        return None
    steps = -(-sum(known) // size)
    return turns * steps if min(known) >= steps else None


class OwnPipe:
    """Follows `flatout.data.source.Source`: batches of one rank's pipe, until a rank has no more.

    Args:
        own: result of `own_pipe`.
        dry: is called with whether this rank's pipe is at its end; returns the number of ranks
            whose pipes are at their end.
        gather: returns the values of all ranks, by rank, for the value of this rank.
        say: prints a line about rows that no batch used.
        left_over_s: seconds for which a pipe is read after the end of the epoch, to count rows
            that no batch used and to let its writer end.
    """

    def __init__(
        self,
        own: Pipeline,
        dry: Callable[[bool], int],
        gather: Callable[[Any], list[Any]],
        say: Callable[[str], None],
        left_over_s: float = 10.0,
    ) -> None:
        self._own, self._dry, self._gather, self._say = own, dry, gather, say
        self._left_over_s = left_over_s

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own, name)

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch, until the first rank's pipe ends."""
        made = self._own.batches(epoch, start_step)
        step = start_step
        batch = next(made, None)
        while not self._dry(batch is None):
            assert batch is not None
            yield batch
            step += 1
            del batch  # not referenced while the next batch is made
            batch = next(made, None)
        self._tell(epoch, step, *((0, False) if batch is None else self._rest(batch, made)))

    def _rest(self, batch: Batch, made: Iterator[Batch]) -> tuple[int, bool]:
        samples, until = batch.size, time.monotonic() + self._left_over_s
        for more in made:
            samples += more.size
            if time.monotonic() > until:
                # The writer has not ended: its rows must not be taken for rows of the next pass.
                getattr(self._own.origin, "leave", lambda: None)()
                return samples, True
        return samples, False

    def _tell(self, epoch: int, step: int, samples: int, more: bool) -> None:
        result = enumerate(self._gather([samples, more]))
        left = [(rank, count, more) for rank, (count, more) in result if count]
        if left:
            words = ", ".join(
                f"{'more than ' if more else ''}{counted(count, 'sample')} of rank {rank}"
                for rank, count, more in left
            )
            self._say(
                f"epoch {epoch + 1} ended after {counted(step, 'step')}, when a rank's pipe had "
                f"run dry; left over: {words}"
            )

    def peek(self, count: int) -> list[Batch]:
        """Return this rank's first batches."""
        return self._own.peek(count)
