"""Several pipelines as one source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from flatout.data.batches.normalization import Normalization
from flatout.data.execution.batch_sampler import Order
from flatout.data.execution.samples import Joined
from flatout.data.ids.classes import listed, unlike_meaning
from flatout.data.ids.lookup import Lookup
from flatout.data.pipeline import Pipeline
from flatout.data.planner import FirstSamples, build_rows
from flatout.data.randomness import order as drawn
from flatout.data.reading.block import Numbers
from flatout.data.reading.origins import Gather, alone
from flatout.data.stages import Normalize, Options
from flatout.errors import DataError


@dataclass(frozen=True)
class Mixture:
    """Several pipelines as one source.

    Attributes:
        parts: pipelines that are mixed.
        weights: fraction of an epoch's samples from each pipeline; None means all rows of all
            pipelines.
        seed: seed of the order in which the pipelines take turns.
    """

    parts: tuple[Pipeline, ...]
    weights: tuple[float, ...] | None
    seed: int

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, equal in all pipelines."""
        return self.parts[0].classes

    @property
    def meanings(self) -> dict[str, str]:
        """Rules by which values become numbers, equal in all pipelines."""
        return self.parts[0].meanings

    def with_classes(self, names: tuple[str, ...]) -> Mixture:
        """Return the same samples, with classes numbered in the order of `names`."""
        return replace(self, parts=tuple(part.with_classes(names) for part in self.parts))

    def with_ids(self, maps: Mapping[str, Lookup]) -> Mixture:
        """Return the same samples, with rows of a table in place of ids."""
        return replace(self, parts=tuple(part.with_ids(maps) for part in self.parts))

    @property
    def stage_words(self) -> list[str]:
        """Stages of all parts that decide a batch's content."""
        return [line for part in self.parts for line in part.stage_words]

    def describe(self) -> str:
        """Return one line for the user."""
        return " mixed with ".join(part.describe() for part in self.parts)

    def notes(self) -> list[str]:
        """Return lines of all parts' sources that the user should read."""
        return [line for part in self.parts for line in getattr(part.origin, "notes", list)()]

    def skipped(self, gather: Gather = alone) -> list[str]:
        """Return lines about rows of all parts that any rank has skipped since the last call."""
        return [line for part in self.parts for line in part.skipped(gather)]

    def begin(self, options: Options, say: Callable[[str], None]) -> FirstSamples:
        """Return the samples of all parts, in their mixed order."""
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
    """Mix the samples of several pipelines that have no `batch` stage.

    Args:
        pipelines: pipelines with the same columns. Each keeps its own shuffle, split and functions.
            If the pipelines name classes, one of them must have all names; all pipelines use its
            class numbers.
        weights: exact fraction of an epoch's samples from each pipeline. An epoch ends when the
            first pipeline has no more samples; the others continue there in the next epoch. None
            takes all samples.
        seed: seed of the order in which the pipelines take turns.

    Raises:
        DataError: there are fewer than two pipelines, or the weights make no sense; or one is a
            stream or has a `batch` stage; or classes, numbers of texts or normalization differ.
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
    """Return an order with `counts[i]` rows of source i in an epoch, in a random sequence.

    A source that has more rows than an epoch takes continues there in the next epoch.
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
