"""The input as a user writes it: a source, and the stages applied to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from time import perf_counter
from typing import Any

import numpy.typing as npt
import torch

from flatout.console import say_as_is
from flatout.data.batches.batch import Batch
from flatout.data.batches.normalization import Normalization
from flatout.data.execution.batch_sampler import last_batch
from flatout.data.execution.claims import Claims
from flatout.data.execution.featured import FeatureRows, Numbered
from flatout.data.execution.program import Program
from flatout.data.execution.samples import Costs
from flatout.data.explanation import Explanation
from flatout.data.ids.classes import COLUMNS, Renumbered, classes_of, listed, meanings_of
from flatout.data.ids.counting import IdCounts, count_ids
from flatout.data.ids.lookup import Lookup, looked_up
from flatout.data.planner import Built, BuiltStream, build, check, of_rank
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.origins import Gather, alone, is_rows, is_stream
from flatout.data.reading.schema import Column, Schema
from flatout.data.stages import Batch as BatchStage
from flatout.data.stages import (
    Blended,
    Cache,
    Map,
    Normalize,
    Options,
    Prefetch,
    Shard,
    Shuffle,
    Split,
    Stage,
    Staged,
    only,
    passes,
)
from flatout.data.workers.prefetch import prefetch
from flatout.devices import check_count
from flatout.errors import DataError

# Images that are decoded to measure how long decoding takes.
_DECODED = 8


class Pipeline(Staged["Pipeline"]):
    """A source of samples and the stages applied to it. Adding a stage returns a new Pipeline.

    Nothing is read before it is needed. Pass the pipeline to `Trainer.fit`, loop over
    `batches(epoch)`, or loop over the pipeline itself, once for each epoch.

    Args:
        origin: Rows, Chunks or a Stream (origins.py), or an object whose `begin` returns samples.
        stages: in the order in which they were written.
        options: resources that the pipeline may use.
        say: prints a line for the user.
    """

    def __init__(
        self,
        origin: Any,
        stages: Sequence[Stage] = (),
        options: Options | None = None,
        say: Callable[[str], None] = say_as_is,
    ) -> None:
        self.origin = origin
        self.stages = tuple(stages)
        self._options = options or Options()
        self._say = say
        self._epoch = 0
        self._step = 0
        self._ahead: Iterator[Batch] | None = None
        # For a pipe that several ranks read: this rank's pipeline, once the ranks have agreed
        # (own_pipes.py).
        self.of_rank: Pipeline | None = None
        self._renumbered: dict[tuple[str, ...], Pipeline] = {}
        self._looked_up: dict[tuple[str, ...], Pipeline] = {}
        # For the part of one rank: the pipeline of all ranks.
        self._of_all: Pipeline | None = None
        self._of_shards: dict[Shard | None, Pipeline] = {}
        check(self.stages)

    def _with(self, stage: Stage) -> Pipeline:
        return self.with_stages((*self.stages, stage))

    def with_stages(self, stages: Sequence[Stage]) -> Pipeline:
        """Return the same source with other stages."""
        return Pipeline(self.origin, stages, self._options, self._say)

    def _of_shard(self, shard: Shard | None) -> Pipeline:
        """Return this pipeline with this shard alone; the same object each time, to keep caches."""
        if shard not in self._of_shards:
            stages = [stage for stage in self.stages if not isinstance(stage, Shard)]
            self._of_shards[shard] = self.with_stages([*stages, *([shard] if shard else [])])
        return self._of_shards[shard]

    def of_all_ranks(self) -> Pipeline:
        """Return this pipeline without a shard: it gives the batches of all ranks."""
        return self._of_shard(None)

    def part_of_rank(self, rank: int, world_size: int) -> Pipeline:
        """Return the part of each batch that belongs to a rank; the same object each time."""
        if self.sharded is not None:
            return self
        part = self._of_shard(Shard(rank, world_size))
        part._of_all = self
        return part

    @property
    def maps_batches(self) -> bool:
        """Whether a function gets whole batches. Such a function may mix the samples of a batch."""
        batch = only(self.stages, BatchStage)
        behind = () if batch is None else self.stages[self.stages.index(batch) :]
        return only(behind, Map) is not None

    def options(
        self,
        *,
        threads: int | None = None,
        processes: int | None = None,
        depth: int | None = None,
        memory: int | None = None,
    ) -> Pipeline:
        """Set resources that the pipeline may use, in place of those it would choose.

        Args:
            threads: number of threads that make batches.
            processes: number of processes that make batches, in place of threads. They are
                spawned, so a script needs `if __name__ == "__main__":`, and functions have to be
                at the top level of a module.
            depth: number of batches made ahead.
            memory: maximum bytes that a cache may use.
        """
        given = {"threads": threads, "processes": processes, "depth": depth, "memory": memory}
        for name, value in given.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DataError(f"options: {name} is an int of at least 1, found {value!r}")
            if value is not None and name in ("threads", "processes"):
                check_count(f"options: {name}", value)
        options = replace(self._options, **{k: v for k, v in given.items() if v is not None})
        return Pipeline(self.origin, self.stages, options, self._say)

    # -- properties --------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The columns of the source.

        Raises:
            DataError: the source has no schema, since it is made of arrays or of several sources.
        """
        schema = getattr(self.origin, "schema", None)
        if schema is None:
            raise DataError(f"a source of {type(self.origin).__name__} has no schema")
        assert isinstance(schema, Schema)
        return schema

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes by index; None if the data have only class numbers."""
        return classes_of(self.origin)

    @property
    def meanings(self) -> dict[str, str]:
        """Rules by which values become numbers. Other rules give other numbers."""
        meanings = meanings_of(self.origin)
        if only(self.stages, Map) is not None:  # the user's function selects columns by name
            meanings.pop(COLUMNS, None)
        return meanings

    def with_classes(self, names: Sequence[str]) -> Pipeline:
        """Return the same samples, with classes numbered in the order of `names`.

        Returns the pipeline itself where the order is the same, or where the data name no classes.

        Args:
            names: names of classes by index, such as those of a model. There may be more classes
                than the data have.

        Raises:
            DataError: the data have other classes, or are split by class.
        """
        names = tuple(names)
        if self.classes in (None, names):
            return self
        if names not in self._renumbered:
            self._renumbered[names] = self._renumber(names)
        return self._renumbered[names]

    def _renumber(self, names: tuple[str, ...]) -> Pipeline:
        if (split := only(self.stages, Split)) is not None and split.stratify:
            assert self.classes is not None
            raise DataError(
                "split(stratify=True) shares out classes by number, and the model has others: "
                f"{listed(self.classes)} here, {listed(names)} there",
                do="give the source these numbers: schema=train.schema, or classes=[...]",
            )
        with_classes = getattr(self.origin, "with_classes", None)
        origin = Renumbered(self.origin, names) if with_classes is None else with_classes(names)
        return Pipeline(origin, self.stages, self._options, self._say)

    @property
    def id_columns(self) -> tuple[Column, ...]:
        """The columns whose schema states how ids become rows of a table."""
        if (parts := getattr(self.origin, "parts", None)) is not None:
            columns: tuple[Column, ...] = parts[0].id_columns
            return columns
        schema = getattr(self.origin, "schema", None)
        columns = schema.columns if isinstance(schema, Schema) else ()
        return tuple(column for column in columns if column.ids)

    def with_ids(self, maps: Mapping[str, Lookup]) -> Pipeline:
        """Return the same samples, with rows of a table in place of ids.

        Args:
            maps: maps from ids to rows, by column. They replace the maps of earlier calls.

        Raises:
            DataError: the source has no such column of dtype int64.
        """
        key = tuple(f"{name}={value.digest}" for name, value in sorted(maps.items()))
        if key not in self._looked_up:
            with_ids = getattr(self.origin, "with_ids", None)
            origin = looked_up(self.origin, maps) if with_ids is None else with_ids(maps)
            self._looked_up[key] = Pipeline(origin, self.stages, self._options, self._say)
        return self._looked_up[key]

    def count_ids(
        self, columns: Sequence[Column], rank: int = 0, ranks: int = 1
    ) -> dict[str, IdCounts] | None:
        """Count each id in the samples, as the ids are in the source. Returns None for a stream.

        Args:
            columns: columns whose schema states ids.
            rank: this rank. It counts a part of the samples, or all if each rank has its own.
            ranks: total number of ranks.

        Raises:
            DataError: a row is invalid, memory cannot hold all ids, or the ids of a stream would
                have to be counted before the stream was read.
        """
        if is_stream(self.origin):
            growing = [c.name for c in columns if any(o.vocabulary != "none" for o in c.ids)]
            if growing:
                raise DataError(
                    f"the ids of column {growing[0]!r} get rows before training, and a stream "
                    "cannot be read twice",
                    do='write it into a file first, or hash the ids: vocabulary = "none"',
                )
            return None
        built = self.with_ids({})._built
        assert isinstance(built, Built)
        plan = built.plan
        numbers = plan.numbers if self.has_own_rows else plan.numbers[rank::ranks]
        counts = {column.name: IdCounts(column) for column in columns}
        count_ids(plan.base, numbers, counts)
        return counts

    @property
    def in_batches(self) -> bool:
        """Whether the pipeline has a `batch` stage."""
        return only(self.stages, BatchStage) is not None

    @property
    def normalization(self) -> Normalization | None:
        """Scaling that `normalize` applies to bytes; None without a `normalize` stage."""
        stage = only(self.stages, Normalize)
        return None if stage is None else stage.normalization

    @cached_property
    def in_bytes(self) -> Pipeline:
        """The same pipeline without `normalize`, for scaling on a device. It shares all caches."""
        if self.normalization is None:
            return self
        if self._of_all is not None and self.sharded is not None:
            return self._of_all.in_bytes.part_of_rank(self.sharded.rank, self.sharded.world_size)
        return self.with_stages([s for s in self.stages if not isinstance(s, Normalize)])

    @cached_property
    def _built(self) -> Built | BuiltStream:
        if self.in_bytes is not self:
            return self.in_bytes._built
        whole = None if self._of_all is None else self._of_all._built
        if isinstance(whole, Built) and self.sharded is not None:
            part = of_rank(whole, self.sharded.rank, self.sharded.world_size)
            if part is not None:
                return part
        return build(self.origin, self.stages, self._options, self._say)

    @property
    def _program(self) -> Any:
        if not self.in_batches:
            raise DataError(
                "the pipeline makes no batches", do="add .batch(size), or pass batch_size to fit"
            )
        return self._built.program

    @property
    def prefetches(self) -> Prefetch | None:
        """The stage that copies batches to a device ahead of their use, or None."""
        return only(self.stages, Prefetch)

    @property
    def sharded(self) -> Shard | None:
        """The part of all ranks' data that this pipeline has; None if it has all data."""
        return only(self.stages, Shard)

    @property
    def has_own_rows(self) -> bool:
        """Whether each rank has its own rows, instead of a part of each global batch."""
        return self.sharded is not None and self.sharded.has_own_rows

    def agreed(self, gather: Callable[[int], list[int]]) -> Pipeline:
        """Return these data with a number of steps. The ranks agree on it if the user gave none.

        Args:
            gather: returns the numbers of all ranks for the number of this rank.

        Raises:
            DataError: no rank has a sample. All ranks raise it.
        """
        shard, size = self.sharded, self.batch_size
        if shard is None or not shard.has_own_rows or shard.steps is not None or size is None:
            return self
        if not self.seekable:
            return self  # see own_pipes.py
        stages = [stage for stage in self.stages if stage is not shard]
        turns = passes(stages)
        own = self._of_shard(replace(shard, steps=turns)) if shard.presharded else self
        assert own.samples is not None
        total = sum(gather(own.samples))
        if not total:
            raise DataError("no sample is left for any rank", do="filter less, or use more data")
        if not shard.presharded:
            return self
        return self._of_shard(replace(shard, steps=turns * -(-total // (turns * size))))

    @property
    def seekable(self) -> bool:
        """Whether a pass can start at any batch."""
        return not is_stream(self.origin)

    @property
    def counted(self) -> bool:
        """Whether the number of batches in an epoch is known."""
        return self.steps is not None

    @property
    def samples(self) -> int | None:
        """Number of samples of an epoch, over all ranks; None if not known."""
        return self._built.used

    @property
    def rows_to_cut(self) -> int | None:
        """Number of samples, over all ranks, from which batches are made, with dropped samples.

        The number counts an epoch, or one pass where each pass ends with its own last batch. None
        where the number is not known, as for presharded data before the ranks have agreed.
        """
        if self.sharded is not None and self.sharded.presharded:
            return None
        return self._built.rows_to_cut

    @property
    def steps(self) -> int | None:
        """Number of batches of an epoch; None if not known."""
        return self._built.steps

    @property
    def batch_size(self) -> int | None:
        """Number of samples of a global batch; None without a `batch` stage."""
        batch = only(self.stages, BatchStage)
        return None if batch is None else batch.size

    @property
    def last_batch(self) -> int | None:
        """Rows in the last batch of an epoch, or of each pass, with the rows that fill it up.

        None if the number is not known.
        """
        batch = only(self.stages, BatchStage)
        if batch is None or self.has_own_rows:
            return None
        if batch.last != "keep":
            return batch.size
        rows = self._built.last_rows
        return None if rows is None else last_batch(rows, batch.size, drop_last=False)

    @property
    def direct(self) -> Any:
        """The source whose batches are used unchanged, as for arrays without a user's function.

        None if samples are made one by one.
        """
        if not self.in_batches or self.normalization is not None or self.prefetches is not None:
            return None
        is_made = isinstance(self._built, BuiltStream) or isinstance(self._program, Program)
        return None if is_made else self._program

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the source, the chosen samples, and the functions."""
        return self._built.digest(self.stages)

    @cached_property
    def stage_words(self) -> list[str]:
        """Stages that decide a batch's content, with function names, which a resume compares."""
        words = [stage.resume_words() for stage in self.stages]
        return [*getattr(self.origin, "stage_words", []), *(line for line in words if line)]

    def describe(self) -> str:
        """Return one line, such as "2 LibSVM files, 0.9 MB, 8,124 rows, shuffled by seed 1"."""
        shuffle, chosen = only(self.stages, Shuffle), self._built.chosen
        parts = [self.origin.describe(), *([] if chosen is None else [f"{chosen:,} chosen"])]
        order = "in the given order" if shuffle is None else f"shuffled by seed {shuffle.seed}"
        return ", ".join([*parts, order])

    def where(self, number: int) -> str | None:
        """Return the location of a sample in the data, such as file and line; None for a stream."""
        return self._built.where(number)

    def labels_range(self) -> tuple[int, int] | None:
        """Return the smallest and largest target, if they are integers known in advance."""
        if only(self.stages, Map) is not None or only(self.stages, Blended) is not None:
            return None
        if hasattr(self.origin, "labels_range"):
            known: tuple[int, int] | None = self.origin.labels_range()
            return known
        targets = self.origin.targets() if is_rows(self.origin) else None
        if targets is None or targets.dtype.kind not in "iu":
            return None
        return int(targets.min()), int(targets.max())

    def targets(self) -> npt.NDArray[Any]:
        """Return the target of each sample of epoch 0, in its order; shape (samples, ...).

        Class folders and arrays know their targets. Other sources, and pipelines with `map`, make
        every sample to get its target.

        Raises:
            DataError: the data are a stream, or a sample does not have exactly one target.
        """
        return self._built.targets()

    def skipped(self, gather: Gather = alone) -> list[str]:
        """Return lines about rows that any rank has skipped or changed since the last call.

        Args:
            gather: returns the values of all ranks for the value of this rank. All ranks call this.
        """
        return list(self.origin.skipped(gather)) if hasattr(self.origin, "skipped") else []

    def notes(self) -> list[str]:
        """Return lines that the user should read: rows skipped, stages moved, order of classes."""
        return [*getattr(self.origin, "notes", list)(), *self._built.notes()]

    # -- batches -----------------------------------------------------------------------------

    def numbered(self) -> Numbered | str:
        """Return the samples by index, if a sample is equal in all epochs or has a few variants.

        If not, return a text with the reason.
        """
        built = self._built
        if not isinstance(built, Built):
            return "the rows of a stream have no numbers"
        return built.numbered()

    def cached(self) -> tuple[Pipeline, float] | None:
        """Return the pipeline with a cache of its images, and the seconds to decode one.

        Returns None if the samples are no images, and where there is a cache already.
        """
        built = self._built
        if not isinstance(built, Built) or built.caches or self._origin_name != "images":
            return None
        some = built.plan.numbers[:_DECODED]
        began = perf_counter()
        built.plan.base.make(some, Buffers(), 0, Costs())
        decoding_s = (perf_counter() - began) / len(some)
        at = next(n for n, stage in enumerate(self.stages) if isinstance(stage, BatchStage))
        return self.with_stages([*self.stages[:at], Cache("auto"), *self.stages[at:]]), decoding_s

    @property
    def can_claim(self) -> bool:
        """Whether a rank may claim parts of batches: they can be made in any order, from rows."""
        by_rows = isinstance(self._program, Program) and not self.has_own_rows
        return self.seekable and by_rows and self.prefetches is None

    def claimed(
        self, epoch: int, claims: Claims, features: FeatureRows | None = None
    ) -> Iterator[Batch]:
        """Yield the parts of an epoch's batches that a rank claims; requires `can_claim`.

        Args:
            epoch: index of the epoch, from 0.
            claims: claims of the rank.
            features: stored features of some samples, as for `batches`.
        """
        normalization = self.normalization
        if normalization is not None:
            return map(normalization.batch, self.in_bytes.claimed(epoch, claims, features))
        made: Iterator[Batch] = self._program.claimed(epoch, claims, features)
        return made

    def batches(
        self, epoch: int, start_step: int = 0, features: FeatureRows | None = None
    ) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_step` on.

        Args:
            epoch: index of the epoch, from 0.
            start_step: index of the first batch.
            features: features of some samples, which then are not made: see `Batch.kept`. Only
                for samples that are `numbered`.

        Raises:
            DataError: the epoch has no such step, or a row is invalid.
        """
        normalization = self.normalization
        if normalization is not None:
            made = self.in_bytes.batches(epoch, start_step, features)
            return map(normalization.batch, made)
        if self._ahead is not None and epoch == 0:
            ahead, self._ahead = self._ahead, None
            return islice(ahead, start_step, None)
        # Samples in memory are gathered as quickly as their features, so they use no features.
        has_rows = isinstance(self._program, Program) and features is not None
        made = self._program.batches(epoch, start_step, *([features] if has_rows else []))
        if self.prefetches is not None:
            made = prefetch(made, torch.device(self.prefetches.device), self.prefetches.depth)
        return made

    def expect_epochs(self, total: int | None) -> None:
        """Set the number of epochs of the whole run, or None if it is not known.

        Processes that would cost more time than they save in the rest of the run are not started.
        """
        if isinstance(program := self._program, Program):
            program.repay.epochs = total

    def peek(self, count: int) -> list[Batch]:
        """Return the first batches of epoch 0, which epoch 0 then still contains."""
        normalization = self.normalization
        if normalization is not None:
            return list(map(normalization.batch, self.in_bytes.peek(count)))
        made = self.batches(0)
        first = list(islice(made, count))
        if not self.seekable:  # a pipe cannot be read again, so epoch 0 begins with these batches
            self._ahead = chain(first, made)
        return first

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the present epoch's batches; the next loop is the next epoch."""
        for batch in self.batches(self._epoch, self._step):
            self._step += 1
            yield batch
        self._epoch, self._step = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of a loop over the pipeline. A Trainer keeps its own position."""
        return {"epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called, with any number of threads or ranks."""
        self._epoch, self._step = int(state["epoch"]), int(state["step"])

    # -- explaining --------------------------------------------------------------------------

    def explanation(self) -> Explanation:
        """Return the stages as written, the steps that run, and their costs."""
        if with_rows := [value for maps, value in self._looked_up.items() if maps]:
            return with_rows[-1].explanation()  # the pipeline that the training has run
        written = [self._origin_name, *(stage.name for stage in self.stages)]
        program, runs = self._program, list(self._built.runs)
        if self.normalization is not None:
            runs.append("normalize")
        padding = None if self.batch_size is None else self._built.padding(self._epoch)
        return Explanation.of(program, written, runs, self.notes(), padding)

    @property
    def _origin_name(self) -> str:
        schema = getattr(self.origin, "schema", None)
        return (type(self.origin).__name__ if schema is None else str(schema.format)).lower()

    def __repr__(self) -> str:
        return f"<Pipeline: {' → '.join([self._origin_name, *map(str, self.stages)])}>"

    def explain(self) -> None:
        """Print the explanation."""
        print(self.explanation())
