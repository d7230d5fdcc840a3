"""Several pipelines as one source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flatout.data.block import Numbers
from flatout.data.classes import listed, unlike_meaning
from flatout.data.execution.batch_sampler import Order
from flatout.data.execution.samples import Joined
from flatout.data.ids.lookup import Lookup
from flatout.data.normalization import Normalization
from flatout.data.order import order as drawn
from flatout.data.origins import Gather, alone
from flatout.data.pipeline import Pipeline
from flatout.data.planner import FirstSamples, build_rows
from flatout.data.stages import Normalize, Options
from flatout.errors import DataError


@dataclass(frozen=True)
class Mixture:
    """Several pipelines as one source.

    Attributes:
        parts: what is mixed.
        weights: how often each is drawn; None means all rows of all.
        seed: of the draws.
    """

    parts: tuple[Pipeline, ...]
    weights: tuple[float, ...] | None
    seed: int

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The same of all."""
        return self.parts[0].classes

    @property
    def meanings(self) -> dict[str, str]:
        """The same of all."""
        return self.parts[0].meanings

    def with_classes(self, names: tuple[str, ...]) -> Mixture:
        """The same samples, whose classes have the numbers that their names have here."""
        return replace(self, parts=tuple(part.with_classes(names) for part in self.parts))

    def with_ids(self, maps: Mapping[str, Lookup]) -> Mixture:
        """The same samples, with rows of a table in place of ids."""
        return replace(self, parts=tuple(part.with_ids(maps) for part in self.parts))

    @property
    def stage_words(self) -> list[str]:
        """Stages of all that decide what a batch holds."""
        return [line for part in self.parts for line in part.stage_words]

    def describe(self) -> str:
        """One line for people."""
        return " mixed with ".join(part.describe() for part in self.parts)

    def notes(self) -> list[str]:
        """What the user should know of the sources of all."""
        return [line for part in self.parts for line in getattr(part.origin, "notes", list)()]

    def skipped(self, gather: Gather = alone) -> list[str]:
        """Rows of all that any rank has skipped since this was asked last."""
        return [line for part in self.parts for line in part.skipped(gather)]

    def begin(self, options: Options, say: Callable[[str], None]) -> FirstSamples:
        """The samples of all, in their mixed order."""
        for part in self.parts:
            if part.sharded is not None and not part.has_own_rows:
                raise DataError("shard comes before mix", do="put shard after mix")
        built = [build_rows(part.origin, part.stages, options, say) for part in self.parts]
        plans = [part.plan for part in built]
        joined = Joined([plan.samples for plan in plans], [plan.numbers for plan in plans])
        orders = [
            partial(_shifted, part.cut.order, int(start))
            for part, start in zip(built, joined.starts, strict=False)
        ]
        sizes = [part.cut.samples for part in built]
        if self.weights is None:
            counts = sizes
        else:
            total = min(size / weight for size, weight in zip(sizes, self.weights, strict=True))
            counts = [int(total * weight + 1e-9) for weight in self.weights]
        if min(counts) < 1:
            raise DataError(f"mixing {sizes} samples by {self.weights} leaves a source without any")
        return FirstSamples(joined, mixed(orders, counts, sizes, self.seed))


def mix(*pipelines: Pipeline, weights: Sequence[float] | None = None, seed: int = 0) -> Pipeline:
    """Samples of several pipelines, which are not in batches yet, as one.

    Args:
        pipelines: with the same columns. Each keeps its own shuffle, split and functions.
            Where they name classes, one has all names, and its numbers hold for the others.
        weights: the share of each in an epoch, to be counted exactly, not drawn; the epoch is as
            long as the source allows that runs out first, and the others go on in the next epoch
            where they stopped. None takes all samples of all.
        seed: of the sequence in which they take turns.

    Raises:
        DataError: there are fewer than two, one is a stream or in batches already, their classes
            differ, they number the texts of a column differently, they are not normalized alike,
            or the weights make no sense.
    """
    if len(pipelines) < 2:
        raise DataError(f"mix wants at least two pipelines, found {len(pipelines)}")
    pipelines = tuple(
        pipeline if isinstance(pipeline, Pipeline) else Pipeline(pipeline) for pipeline in pipelines
    )
    for pipeline in pipelines:
        if pipeline.in_batches or not pipeline.seekable:
            raise DataError(
                "mix takes pipelines of numbered samples that are not in batches yet",
                do="put batch after mix; convert streams to files",
            )
    pipelines = _of_same_classes(pipelines)
    _check_meanings(pipelines)
    shares = None
    if weights is not None:
        if len(weights) != len(pipelines) or any(not weight > 0 for weight in weights):
            raise DataError(
                f"mix wants a positive weight for each of {len(pipelines)} pipelines, "
                f"found {list(weights)}"
            )
        shares = tuple(weight / sum(weights) for weight in weights)
    normalization = _shared_normalization(pipelines)
    mixed = Pipeline(Mixture(tuple(pipeline.in_bytes for pipeline in pipelines), shares, seed))
    return mixed if normalization is None else mixed.with_stages([Normalize(normalization)])


def _of_same_classes(pipelines: tuple[Pipeline, ...]) -> tuple[Pipeline, ...]:
    classes = [pipeline.classes for pipeline in pipelines]
    named = [names for names in classes if names is not None]
    if len(set(named)) < 2:
        return pipelines
    every = {name for names in named for name in names}
    whole = next((names for names in named if set(names) == every), None)
    if whole is None:
        raise DataError(
            f"mix: the sources number different classes: {' and '.join(map(listed, named[:2]))}",
            do=f"give each of them classes={sorted(every)}",
        )
    return tuple(pipeline.with_classes(whole) for pipeline in pipelines)


def _shared_normalization(pipelines: Sequence[Pipeline]) -> Normalization | None:
    first, *others = (pipeline.normalization for pipeline in pipelines)
    if any(other != first for other in others):
        words = [
            "not normalized" if pipeline is None else pipeline.words()
            for pipeline in (first, *others)
        ]
        raise DataError(
            f"mix: the sources are not normalized alike: {'; '.join(dict.fromkeys(words))}",
            do="put normalize after mix, where it holds for all",
        )
    return first


def _check_meanings(pipelines: Sequence[Pipeline]) -> None:
    known: dict[str, str] = {}
    for pipeline in pipelines:
        words = unlike_meaning(known, pipeline.meanings, "the first source")
        known.update(pipeline.meanings)
        if words is not None:
            raise DataError(
                f"mix: {words}",
                where=pipeline.describe(),
                do="read all files as one source, or give each the schema of the first: "
                "schema=first.schema",
            )


def _shifted(order: Order, by: int, epoch: int) -> Numbers:
    return order(epoch) + by


def mixed(orders: Sequence[Order], counts: list[int], sizes: list[int], seed: int) -> Order:
    """Rows of several sources, `counts[i]` of source i in an epoch, in a drawn sequence.

    A source that has more rows than an epoch takes goes on in the next epoch where it stopped.
    """
    labels = np.repeat(np.arange(len(counts)), counts)

    def sequence(epoch: int) -> Numbers:
        turns = labels[drawn(len(labels), seed, epoch)]
        out = np.empty(len(labels), np.int64)
        for source, (own, count, size) in enumerate(zip(orders, counts, sizes, strict=True)):
            out[turns == source] = _go_on(own, epoch * count, count, size)
        return out

    return sequence


def _go_on(own: Order, start: int, count: int, size: int) -> Numbers:
    passes = range(start // size, -(-(start + count) // size))
    joined = np.concatenate([own(item) for item in passes])
    first = start - passes.start * size
    return joined[first : first + count]
