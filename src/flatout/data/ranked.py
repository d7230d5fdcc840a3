"""One rank's part of a source's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Literal, TypeAlias

from flatout.data.batches.batch import Batch
from flatout.data.execution.claims import Claims
from flatout.data.execution.featured import FeatureRows
from flatout.data.pipeline import Pipeline
from flatout.data.source import Source
from flatout.errors import DataError

Share: TypeAlias = Literal["part", "own", "copy"]
"""The relation of a rank's batch to the global batch.

"part": a part of the global batch. "own": a batch of the rank's own loader. "copy": the whole.
"""


def ranked(
    source: Source,
    rank: int,
    world_size: int,
    look: Callable[[Batch], Share] | None = None,
    *,
    whole: bool = False,
    ends: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> Source:
    """Return the source for one rank of several: each global batch is split into one part per rank.

    A batch of fewer samples than ranks goes whole to every rank; see `Batch.copies`.
    """
    shard = source.sharded if isinstance(source, Pipeline) else None
    if shard is not None and (shard.rank, shard.world_size) != (rank, world_size):
        raise DataError(
            f"this is rank {rank} of {world_size}, but the pipeline is the part of rank "
            f"{shard.rank} of {shard.world_size}",
            do="write .shard() without rank and world size, or leave it out: each rank gets its "
            "share of every batch by itself",
        )
    if world_size == 1 or (shard is not None and shard.has_own_rows):
        return source
    return _Ranked(source, rank, world_size, look, whole, ends)


def whole_of(source: Source) -> Source:
    """Return the source of whole batches that `ranked` has split; any other source unchanged."""
    return source._whole if isinstance(source, _Ranked) else source


class _Ranked:
    """Follows `flatout.data.source.Source`. Counts such as `samples` are over all ranks."""

    def __init__(
        self,
        source: Source,
        rank: int,
        world_size: int,
        look: Callable[[Batch], Share] | None,
        all_whole: bool,
        ends: Callable[[Iterator[Batch]], Iterator[Batch]],
    ) -> None:
        self._rank, self._world_size, self._all_whole = rank, world_size, all_whole
        self._look, self._ends = look, ends
        self._whole = source
        # A rank that reads a Pipeline makes its own rows alone, unless a map function needs whole
        # batches. A rank that reads another source reads whole batches and cuts out its part.
        self._own = None
        if isinstance(source, Pipeline) and not all_whole:
            if source.maps_batches:
                self._whole = source.of_all_ranks()
            else:
                self._own = source.part_of_rank(rank, world_size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    def batches(
        self, epoch: int, start_step: int = 0, features: FeatureRows | None = None
    ) -> Iterator[Batch]:
        if self._own is None:
            return self._parts(self._whole.batches(epoch, start_step))
        made = self._own.batches(epoch, start_step, features)
        rank = self._rank
        return (self._counted(batch, step, rank) for step, batch in enumerate(made, start_step))

    @property
    def can_claim(self) -> bool:
        if self._own is None and isinstance(self._whole, Pipeline):
            return False
        source = self._whole if self._own is None else self._own
        return not self._all_whole and getattr(source, "can_claim", False)

    def claimed(
        self, epoch: int, claims: Claims, features: FeatureRows | None = None
    ) -> Iterator[Batch]:
        first = claims.used
        if self._own is None:
            made: Iterator[Batch] = self._whole.claimed(epoch, claims)  # type: ignore[attr-defined]
        else:
            made = self._own.claimed(epoch, claims, features)
        for place, batch in enumerate(made, first):
            claim = claims.at(place)
            assert claim is not None
            yield self._counted(batch, *claim)

    def _parts(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        first = next(batches, None)
        if first is None:
            return
        share = "part" if self._look is None else self._look(first)
        batches = chain([first], batches)
        del first  # not referenced while the batch is used
        if share == "own":
            yield from self._ends(batches)
        elif share == "copy":
            yield from (self._copy(batch, self._rank) for batch in batches)
        else:
            yield from map(self._part, batches)

    def peek(self, count: int) -> list[Batch]:
        if self._own is None:
            first = self._whole.peek(count)
            return [batch if batch.is_jagged else self._part(batch) for batch in first]
        made = enumerate(self._own.peek(count))
        return [self._counted(batch, step, self._rank) for step, batch in made]

    def _part(self, batch: Batch) -> Batch:
        if self._all_whole:
            is_copy = self._rank < self._world_size - 1
            return batch._replace(copies=self._world_size, is_copy=is_copy, whole=batch.samples)
        if batch.size < self._world_size:
            return self._copy(batch, self._rank)
        start = batch.size * self._rank // self._world_size
        return batch.rows(start, batch.size * (self._rank + 1) // self._world_size)

    def _counted(self, batch: Batch, step: int, rank: int) -> Batch:
        size, samples = self._whole.batch_size, self._whole.samples
        if size is None or samples is None:
            return batch
        whole = min(size, samples - step * size)
        # If a batch is filled up, each rank has its own part, even if it only fills the batch up.
        if whole < self._world_size and not batch.padding:
            return self._copy(batch, rank)
        return batch._replace(start=whole * rank // self._world_size, whole=whole)

    def _copy(self, batch: Batch, rank: int) -> Batch:
        return batch._replace(copies=self._world_size, is_copy=rank > 0, whole=batch.size)
