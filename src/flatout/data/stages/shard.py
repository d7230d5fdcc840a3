"""shard: take a rank's part of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from flatout.data.execution.batch_sampler import BatchSampler, whole_number
from flatout.data.reading.block import Numbers
from flatout.data.reading.origins import Stream
from flatout.data.stages.batch import Batch
from flatout.data.stages.repeat import passes, samples_times
from flatout.data.stages.stage import P, Plan, Stage, Writable, only
from flatout.errors import DataError
from flatout.words import counted
from flatout.world import Place, place

Presharded: TypeAlias = Literal["node", "local_rank", "rank"]


@dataclass(frozen=True)
class Shard(Stage):
    """Selects the data of one rank.

    Attributes:
        rank: rank that reads this pipeline.
        world_size: number of ranks.
        by: unit in which data are divided among ranks: "batch" (a part of each batch), "files" or
            "rows" (ranges of rows).
        presharded: the user's statement of how the rows were divided before.
        beside: with `presharded`, the index of this rank among the ranks with the same rows, and
            the number of these ranks.
        steps: with `presharded`, number of batches in an epoch; None until the ranks have agreed.
    """

    rank: int
    world_size: int
    by: Literal["batch", "files", "rows"] = "batch"
    presharded: bool | Presharded = False
    beside: tuple[int, int] = (0, 1)
    steps: int | None = None

    once: ClassVar[bool] = True

    @property
    def has_own_rows(self) -> bool:
        """Whether ranks have their own rows, instead of parts of the same batches."""
        return bool(self.presharded) or self.by != "batch"

    def resume_words(self) -> None:
        """Return None: global batches are the same without this stage."""

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        turns = passes([*before, self, *behind])
        if self.steps is not None and self.steps % turns:
            raise DataError(
                f"shard(presharded=True, steps={self.steps:,}) cannot be shared out alike among "
                f"the {turns:,} passes of repeat, which comes after batch",
                do=f"pass a multiple of {turns:,} as steps, or put repeat before batch",
            )

    @property
    def chooses(self) -> bool:
        return self.has_own_rows

    def check_convert(self) -> None:
        if self.by == "batch":
            raise DataError(
                "convert writes rows, and shard makes batches",
                do="convert the pipeline as it is before batch and shard",
            )

    def check_stream(self, stream: Stream, stages: Sequence[Stage]) -> None:
        if self.by != "batch":
            raise DataError(
                f"shard(by={self.by!r}) wants rows that can be found by number, and a stream has "
                "none",
                do="leave it out: each rank reads its own pipe",
            )
        if self.presharded == "local_rank":
            raise DataError(
                "shard(presharded='local_rank') is for files",
                do="say it where the pipe is opened: fifo(..., presharded='local_rank')",
            )
        if self.steps is not None and stream.rows is None:
            raise DataError(
                "shard(steps=...) of a stream wants to know how many rows come",
                do="pass rows= to fifo, or leave steps out: ranks end an epoch together",
            )
        batch = only(stages, Batch)
        if batch is not None and batch.size < self.world_size:
            raise DataError(
                f"a batch of {counted(batch.size, 'sample')} has none for some of "
                f"{self.world_size} ranks, each of which reads its own pipe",
                do="use a larger batch, or fewer ranks",
            )

    def choose(self, plan: Plan) -> None:
        if self.has_own_rows:
            plan.everywhere = len(plan.numbers)
            plan.numbers = self.rows_of(plan.numbers, getattr(plan.origin, "file_rows", None))

    def rows_of(self, numbers: Numbers, file_rows: Numbers | None) -> Numbers:
        """Return a rank's own rows: whole files, or a range, of the rows of this process."""
        rank, world = self.beside if self.presharded else (self.rank, self.world_size)
        if world == 1:
            return numbers
        files = 0 if file_rows is None else len(file_rows) - 1
        if self.by == "files":
            if file_rows is None or files < world:
                raise DataError(
                    f"sharding by files wants at least {world} files, found {files}",
                    do='use by="rows", or by="batch"',
                )
            owner = _balanced(np.diff(file_rows), world)
            mine = owner[np.searchsorted(file_rows, numbers, side="right") - 1] == rank
            return np.asarray(numbers[mine])
        return numbers[len(numbers) * rank // world : len(numbers) * (rank + 1) // world]

    def share(self, batches: BatchSampler, plan: Plan) -> BatchSampler:
        """Return this rank's part of each batch, or its own rows split into all ranks' steps."""
        if not self.has_own_rows:
            return replace(batches, rank=self.rank, world_size=self.world_size)
        if not self.presharded:
            assert plan.everywhere is not None
            rows = plan.everywhere * samples_times(plan.stages)
            steps = batches.passes * max(1, -(-rows // batches.batch_size))
        elif self.steps is not None:
            steps = self.steps
        else:
            raise DataError(
                "shard(presharded=True): no rank knows how many samples the others have",
                do="hand the pipeline to a Trainer, whose ranks find it out, or pass steps=, the "
                "same on every rank: samples of all ranks / batch size, rounded up",
            )
        return replace(batches, even_steps=steps)

    def size(self, at: int, whole: int, rows: int | None, turns: int) -> int:
        """Return the rows of batch `at` in a pass of a stream: this rank's part of the batch size.

        If the ranks have agreed on the steps of an epoch, this rank's rows are spread over them.
        """
        if self.world_size > 1 and self.steps is not None and rows is not None:
            steps = self.steps // turns
            return rows * (at + 1) // steps - rows * at // steps
        return whole * (self.rank + 1) // self.world_size - whole * self.rank // self.world_size


def shard(
    self: Writable[P],
    rank: int | None = None,
    world_size: int | None = None,
    *,
    by: Literal["batch", "files", "rows"] = "batch",
    presharded: bool | Presharded = False,
    steps: int | None = None,
) -> P:
    """Take the part of one rank. All ranks make equal steps; no sample is lost or repeated.

    A Trainer and a Loop give each rank its part of every batch by themselves. Use this stage if
    ranks should have their own samples, or for a loop without Trainer and Loop.
    """
    if (rank is None) != (world_size is None):
        raise DataError("shard: pass both rank and world_size, or neither")
    if by not in ("batch", "files", "rows"):
        raise DataError(f"shard: by is 'batch', 'files' or 'rows', found {by!r}")
    if presharded not in (False, True, "node", "local_rank", "rank"):
        raise DataError(
            "shard: presharded is True, 'node', 'local_rank' or 'rank', found " + repr(presharded)
        )
    if steps is not None and not presharded:
        raise DataError("shard: steps= is for presharded=True alone")
    if steps is not None:
        whole_number("shard: steps", steps, 1)
    if presharded in ("node", "local_rank") and rank is not None:
        raise DataError(
            f"shard: presharded={presharded!r} depends on where this process runs",
            do="leave rank and world_size out",
        )
    beside = (0, 1)
    if rank is None or world_size is None:
        here = place()
        rank, world_size = here.rank, here.world_size
        beside = _beside(presharded, here)
    elif not 0 <= rank < world_size:
        raise DataError(f"shard: expected a rank from 0 to {world_size - 1}, found {rank}")
    return self._with(Shard(rank, world_size, by, presharded, beside, steps))


def _beside(presharded: bool | Presharded, here: Place) -> tuple[int, int]:
    if presharded == "local_rank":
        return here.node, here.nodes
    if presharded in ("node", True):
        return here.local_rank, here.local_world_size
    return 0, 1


def _balanced(sizes: Numbers, ranks: int) -> Numbers:
    owner = np.empty(len(sizes), np.int64)
    load = np.zeros(ranks, np.int64)
    for at in np.argsort(-sizes, kind="stable"):
        owner[at] = int(load.argmin())
        load[owner[at]] += sizes[at]
    return owner
