"""The input as a user writes it: a source, and stages behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from flatout.console import say_as_is
from flatout.data.batch import Batch
from flatout.data.classes import Renumbered, classes_of, listed, texts_of
from flatout.data.execution.batch_sampler import last_batch, padding_share
from flatout.data.execution.buffers import Buffers
from flatout.data.execution.digests import digest_of, function_digest
from flatout.data.execution.prefetch import prefetch
from flatout.data.execution.program import Program
from flatout.data.execution.samples import Costs, name_of
from flatout.data.execution.stream_program import StreamProgram
from flatout.data.explanation import Explanation
from flatout.data.form import Leaf
from flatout.data.normalization import Normalization
from flatout.data.origins import Chunks, Rows, Stream, is_rows, is_stream
from flatout.data.planner import Built, Mixture, Options, build, check
from flatout.data.schema import Schema
from flatout.data.sources.arrays import Arrays
from flatout.data.sources.torch_dataset import DatasetRows
from flatout.data.staged import Staged
from flatout.data.stages import Batch as BatchStage
from flatout.data.stages import (
    Cache,
    Filter,
    Map,
    Normalize,
    Prefetch,
    Shard,
    Shuffle,
    Split,
    Stage,
    call,
    passes,
    samples_times,
    words,
)
from flatout.devices.threads import check_count
from flatout.errors import DataError


class Pipeline(Staged):
    """A source of samples and the stages behind it. Every stage gives a new Pipeline.

    Nothing is read before it is needed. Hand it to `Trainer.fit`, or loop over `batches(epoch)`, or
    over the pipeline itself, epoch after epoch.

    Args:
        origin: Rows, Chunks, a Stream, Arrays, or a Mixture of pipelines.
        stages: in the order in which they were written.
        options: what it may use.
        say: gets a line for people.
    """

    def __init__(
        self,
        origin: Rows | Chunks | Stream | Arrays | DatasetRows | Mixture,
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
        # Of a pipe: what this rank of several reads, once they have agreed on it (own_pipes.py).
        self.of_rank: Pipeline | None = None
        self._renumbered: dict[tuple[str, ...], Pipeline] = {}
        check(self.stages)

    def _with(self, stage: Stage) -> Pipeline:
        return self.with_stages((*self.stages, stage))

    def with_stages(self, stages: Sequence[Stage]) -> Pipeline:
        """The same source with other stages behind it."""
        return Pipeline(self.origin, stages, self._options, self._say)

    def options(
        self,
        *,
        threads: int | None = None,
        processes: int | None = None,
        depth: int | None = None,
        memory: int | None = None,
    ) -> Pipeline:
        """What it may use, in place of what it would find out.

        Args:
            threads: that make batches.
            processes: that make batches, in place of threads. They are spawned, so a script needs
                `if __name__ == "__main__":`, and functions have to stand at the top of a module.
            depth: batches made ahead.
            memory: bytes that a cache may take.
        """
        given = {"threads": threads, "processes": processes, "depth": depth, "memory": memory}
        for name, value in given.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DataError(f"options: {name} is an int of at least 1, found {value!r}")
            if value is not None and name in ("threads", "processes"):
                check_count(f"options: {name}", value)
        options = replace(self._options, **{k: v for k, v in given.items() if v is not None})
        return Pipeline(self.origin, self.stages, options, self._say)

    # -- what it is --------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        """The columns of the source.

        Raises:
            DataError: the source has none, being made of arrays or of several sources.
        """
        schema = getattr(self.origin, "schema", None)
        if schema is None:
            raise DataError(f"a source of {type(self.origin).__name__} has no schema")
        assert isinstance(schema, Schema)
        return schema

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes by number; None where numbers are all that the data have of them."""
        if isinstance(self.origin, Mixture):
            found: tuple[str, ...] | None = self.origin.parts[0].classes
            return found
        return classes_of(self.origin)

    @property
    def texts(self) -> dict[str, str]:
        """Of columns of texts, a digest of which number is which."""
        if isinstance(self.origin, Mixture):
            found: dict[str, str] = self.origin.parts[0].texts
            return found
        return texts_of(self.origin)

    def with_classes(self, names: Sequence[str]) -> Pipeline:
        """The same samples, whose classes have the numbers that their names have here.

        Itself where nothing differs, or where the data name no classes.

        Args:
            names: of classes by number, such as those of a model; there may be more than the data
                have.

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
        if any(isinstance(stage, Split) and stage.stratify for stage in self.stages):
            assert self.classes is not None
            raise DataError(
                "split(stratify=True) shares out classes by number, and the model has others: "
                f"{listed(self.classes)} here, {listed(names)} there",
                do="give the source these numbers: schema=train.schema, or classes=[...]",
            )
        origin: Any = self.origin
        if isinstance(origin, Mixture):
            parts = tuple(part.with_classes(names) for part in origin.parts)
            origin = replace(origin, parts=parts)
        else:
            origin = Renumbered(origin, names)
        return Pipeline(origin, self.stages, self._options, self._say)

    @property
    def in_batches(self) -> bool:
        """Whether `batch` has been written."""
        return any(isinstance(stage, BatchStage) for stage in self.stages)

    @property
    def normalization(self) -> Normalization | None:
        """What `normalize` makes of its bytes; None where it was not written."""
        stage = next((stage for stage in self.stages if isinstance(stage, Normalize)), None)
        return None if stage is None else stage.normalization

    @cached_property
    def in_bytes(self) -> Pipeline:
        """The same without `normalize`, for what scales on a device. It shares all caches."""
        if self.normalization is None:
            return self
        return self.with_stages([s for s in self.stages if not isinstance(s, Normalize)])

    @cached_property
    def _built(self) -> Built:
        assert not is_stream(self.origin)
        if self.in_bytes is not self:
            return self.in_bytes._built
        origin: Any = self.origin
        return build(origin, self.stages, self._options, self._say)

    @cached_property
    def _program(self) -> Any:
        if not self.in_batches:
            raise DataError(
                "the pipeline makes no batches", do="add .batch(size), or pass batch_size to fit"
            )
        if self.in_bytes is not self:
            return self.in_bytes._program
        if is_stream(self.origin):
            return StreamProgram(self.origin, self.stages, self._options.seed)
        return self._built.program

    @property
    def prefetches(self) -> Prefetch | None:
        """To which device batches are copied ahead of need."""
        return next((stage for stage in self.stages if isinstance(stage, Prefetch)), None)

    @property
    def sharded(self) -> Shard | None:
        """Which part it is of what all ranks have; None where it is all of it."""
        return next((stage for stage in self.stages if isinstance(stage, Shard)), None)

    @property
    def has_own_rows(self) -> bool:
        """Whether each rank has rows of its own, rather than parts of the same batches."""
        return self.sharded is not None and self.sharded.has_own_rows

    def agreed(self, gather: Callable[[int], list[int]]) -> Pipeline:
        """With the number of steps that presharded data make, where nobody has said it.

        Args:
            gather: gives the numbers of all ranks for this rank's own.
        """
        shard, size = self.sharded, self.batch_size
        if shard is None or not shard.presharded or shard.steps is not None or size is None:
            return self
        if is_stream(self.origin):
            return self  # own_pipes.py
        stages = [stage for stage in self.stages if stage is not shard]
        turns = passes(stages)
        own = self.with_stages((*stages, replace(shard, steps=turns))).samples
        assert own is not None
        steps = turns * -(-sum(gather(own)) // (turns * size))
        return self.with_stages((*stages, replace(shard, steps=steps)))

    @property
    def seekable(self) -> bool:
        """Whether a pass can start at any batch."""
        return not is_stream(self.origin)

    @property
    def counted(self) -> bool:
        """Whether it is known how many batches an epoch has."""
        return self.steps is not None

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, over all ranks."""
        if is_stream(self.origin):
            filters = any(isinstance(stage, Filter) for stage in self.stages)
            return None if filters else self.origin.rows
        return self._built.cut.used

    @property
    def rows_to_cut(self) -> int | None:
        """Samples that batches are cut from, over all ranks, those included that `last` drops.

        Those of an epoch, or of one pass where each pass ends with a last batch of its own. None
        where they are not known, as of presharded data before the ranks have agreed.
        """
        if self.sharded is not None and self.sharded.presharded:
            return None
        if not is_stream(self.origin):
            return self._built.everywhere
        return None if self.samples is None else self.samples * samples_times(self.stages)

    @property
    def steps(self) -> int | None:
        """Batches of an epoch."""
        if not is_stream(self.origin):
            return self._built.cut.steps
        size, rows, shard = self.batch_size, self.samples, self.sharded
        if shard is not None and shard.world_size > 1:
            return shard.steps  # those of all ranks
        if rows is None or size is None:
            return None
        turns, rows = passes(self.stages), rows * samples_times(self.stages)
        drop = any(isinstance(s, BatchStage) and s.last == "drop" for s in self.stages)
        return turns * (rows // size if drop else -(-rows // size))

    @property
    def batch_size(self) -> int | None:
        """Samples of a global batch."""
        return next((stage.size for stage in self.stages if isinstance(stage, BatchStage)), None)

    @property
    def last_batch(self) -> int | None:
        """Rows of an epoch's, or of each pass's, last batch, with what fills it up; None where
        that is not known."""
        size = self.batch_size
        if size is None or (self.sharded is not None and self.sharded.has_own_rows):
            return None
        if any(isinstance(stage, BatchStage) and stage.last != "keep" for stage in self.stages):
            return size
        if is_stream(self.origin):
            rows = self.rows_to_cut
        else:
            rows = self._built.cut.samples // self._built.cut.passes
        return None if rows is None else last_batch(rows, size, drop_last=False)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the source, the samples chosen, and the functions."""
        if is_stream(self.origin) and self.has_own_rows:  # the same on all ranks
            return digest_of(self.origin.schema.dumps(), *(words(stage) for stage in self.stages))
        if is_stream(self.origin):
            return digest_of(self.origin.digest, *(words(stage) for stage in self.stages))
        if self.has_own_rows:  # the same on all ranks, though each has other rows
            assert self.sharded is not None
            base = "" if self.sharded.presharded else self._built.samples.digest
            return digest_of(base, self.sharded.by, str(self.steps))
        chosen = self._built.numbers
        whole = len(chosen) == self._built.samples.rows
        return digest_of(self._built.samples.digest, "" if whole else chosen.tobytes().hex())

    @cached_property
    def stage_words(self) -> list[str]:
        """Stages that decide what a batch holds, with names of their functions, for a resume."""
        inner = self.origin.parts if isinstance(self.origin, Mixture) else ()
        found = [line for part in inner for line in getattr(part, "stage_words", [])]
        for stage in self.stages:
            if isinstance(stage, (Map, Filter)):
                name, code = name_of(stage.function), function_digest(stage.function)
                found.append(f"{words(stage)} {name} (code {code[:8]})")
            elif not isinstance(stage, (Cache, Prefetch, Shard)):
                fields = ", ".join(f"{name}={value}" for name, value in vars(stage).items())
                found.append(f"{words(stage)} {fields}")
        return found

    def describe(self) -> str:
        """One line for people, such as "2 LibSVM files, 0.9 MB, 8,124 rows, shuffled by seed 1"."""
        if isinstance(self.origin, Mixture):
            what = " mixed with ".join(part.describe() for part in self.origin.parts)
        else:
            what = self.origin.describe()
        parts = [what]
        if not is_stream(self.origin) and len(self._built.numbers) < self._built.samples.rows:
            parts.append(f"{len(self._built.numbers):,} chosen")
        shuffle = next((stage for stage in self.stages if isinstance(stage, Shuffle)), None)
        parts.append(
            "in the given order" if shuffle is None else f"shuffled by seed {shuffle.seed}"
        )
        return ", ".join(parts)

    def where(self, number: int) -> str | None:
        """File and line, or whatever tells where a sample comes from; None of a stream."""
        if is_stream(self.origin):
            return None
        found: str = self._built.samples.where(number)
        return found

    def labels_range(self) -> tuple[int, int] | None:
        """Smallest and largest target, where they are integers and known beforehand."""
        if any(isinstance(stage, Map) for stage in self.stages):
            return None
        if isinstance(self.origin, Arrays):
            return self.origin.labels_range()
        targets = self.origin.targets() if is_rows(self.origin) else None
        if targets is None or targets.dtype.kind not in "iu":
            return None
        return int(targets.min()), int(targets.max())

    def notes(self) -> list[str]:
        """What the user should know: rows skipped, stages moved, order of classes."""
        notes: list[str] = getattr(self.origin, "notes", list)()
        if is_stream(self.origin):
            return list(notes)
        notes = [*notes, *self._built.moved]
        notes += [f"cache in {'memory' if c.where_kept == 'memory' else 'a folder'}: {c.reason}"
                  for c in self._built.caches]  # fmt: skip
        notes += getattr(self._built.program, "notes", [])
        sorted_note = self._sorted_by_class()
        return [*notes, sorted_note] if sorted_note else notes

    def _sorted_by_class(self) -> str | None:
        """Training on one class after the other forgets the first: said where nothing shuffles."""
        if any(isinstance(stage, Shuffle) for stage in self.stages) or not is_rows(self.origin):
            return None
        targets = self.origin.targets()
        if targets is None:
            numbers = np.linspace(0, self.origin.rows - 1, min(256, self.origin.rows)).astype(
                np.int64
            )
            targets = _targets_at(self._built, numbers)
        if targets is None or targets.ndim != 1 or targets.dtype.kind not in "iu":
            return None
        changes = int((np.diff(targets) != 0).sum())
        classes = len(np.unique(targets))
        if classes < 2 or changes > classes - 1:
            return None
        return (
            "the samples are sorted by class and nothing shuffles them: batches would hold one "
            "class each; add .shuffle(seed)"
        )

    # -- batches -----------------------------------------------------------------------------

    def batches(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on.

        Raises:
            DataError: the epoch has no such step, or a row is not as it should be.
        """
        normalization = self.normalization
        if normalization is not None:
            return map(normalization.batch, self.in_bytes.batches(epoch, start_step))
        if self._ahead is not None and epoch == 0:
            ahead, self._ahead = self._ahead, None
            return islice(ahead, start_step, None)
        made: Iterator[Batch] = self._program.batches(epoch, start_step)
        if self.prefetches is not None:
            made = prefetch(made, torch.device(self.prefetches.device), self.prefetches.depth)
        return made if is_stream(self.origin) or not self._built.caches else self._flushing(made)

    def _flushing(self, made: Iterator[Batch]) -> Iterator[Batch]:
        try:
            yield from made
        finally:
            for cache in self._built.caches:
                cache.flush()

    def expect_epochs(self, total: int | None) -> None:
        """Say how many epochs the run has in all: processes that cost more than they save in
        what is left of it are not started. None where that is not known.
        """
        if isinstance(program := self._program, Program):
            program.repay.epochs = total

    def peek(self, count: int) -> list[Batch]:
        """The first batches of epoch 0, without using anything up."""
        normalization = self.normalization
        if normalization is not None:
            return list(map(normalization.batch, self.in_bytes.peek(count)))
        made = self.batches(0)
        first = list(islice(made, count))
        if is_stream(self.origin):  # what was read is gone from the pipe: epoch 0 begins with it
            self._ahead = chain(first, made)
        return first

    def __iter__(self) -> Iterator[Batch]:
        """One epoch, from where `load_state_dict` left off; the next loop is the next epoch."""
        for batch in self.batches(self._epoch, self._step):
            self._step += 1
            yield batch
        self._epoch, self._step = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where a loop over the pipeline itself stands; a Trainer keeps that for itself."""
        return {"epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with any number of threads or ranks."""
        self._epoch, self._step = int(state["epoch"]), int(state["step"])

    # -- explaining --------------------------------------------------------------------------

    def explanation(self) -> Explanation:
        """What was written, what runs and why that is the same, what each stage costs."""
        written = [self._origin_name, *(words(stage) for stage in self.stages)]
        program = self._program
        runs = list(written) if is_stream(self.origin) else list(self._built.runs)
        if self.normalization is not None and not is_stream(self.origin):
            runs.append("normalize")
        return Explanation.of(program, written, runs, self.notes(), self._padding())

    @property
    def _origin_name(self) -> str:
        schema = getattr(self.origin, "schema", None)
        return (type(self.origin).__name__ if schema is None else str(schema.format)).lower()

    def __repr__(self) -> str:
        return f"<Pipeline: {' → '.join([self._origin_name, *map(call, self.stages)])}>"

    def explain(self) -> None:
        """Print the explanation."""
        print(self.explanation())

    def _padding(self) -> float | None:
        lengths = self.origin.lengths() if is_rows(self.origin) else None
        size = self.batch_size
        if lengths is None or size is None:
            return None
        cut = self._built.cut
        return padding_share(cut.order(self._epoch), lengths, cut.starts())


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
    pipelines = tuple(one if isinstance(one, Pipeline) else Pipeline(one) for one in pipelines)
    for pipeline in pipelines:
        if pipeline.in_batches or is_stream(pipeline.origin):
            raise DataError(
                "mix takes pipelines of numbered samples that are not in batches yet",
                do="put batch behind mix; convert streams to files",
            )
    pipelines = _of_same_classes(pipelines)
    _check_texts(pipelines)
    shares = None
    if weights is not None:
        if len(weights) != len(pipelines) or any(not weight > 0 for weight in weights):
            raise DataError(
                f"mix wants a positive weight for each of {len(pipelines)} pipelines, "
                f"found {list(weights)}"
            )
        shares = tuple(weight / sum(weights) for weight in weights)
    normalization = _shared_normalization(pipelines)
    mixed = Pipeline(Mixture(tuple(one.in_bytes for one in pipelines), shares, seed))
    return mixed if normalization is None else mixed.with_stages([Normalize(normalization)])


def _of_same_classes(pipelines: tuple[Pipeline, ...]) -> tuple[Pipeline, ...]:
    """The same pipelines, in which a class has one number."""
    found = [pipeline.classes for pipeline in pipelines]
    named = [names for names in found if names is not None]
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
    """What all are normalized by, which then runs last, behind mix."""
    first, *others = (pipeline.normalization for pipeline in pipelines)
    if any(other != first for other in others):
        words = ["not normalized" if one is None else one.words() for one in (first, *others)]
        raise DataError(
            f"mix: the sources are not normalized alike: {'; '.join(dict.fromkeys(words))}",
            do="put normalize behind mix, where it holds for all",
        )
    return first


def _check_texts(pipelines: Sequence[Pipeline]) -> None:
    """Refuse columns in which one number means different texts."""
    known: dict[str, str] = {}
    for pipeline in pipelines:
        for name, texts in pipeline.texts.items():
            if known.setdefault(name, texts) != texts:
                raise DataError(
                    f"mix: the sources number the texts of column {name!r} differently",
                    where=pipeline.describe(),
                    do="read all files as one source, or give each the schema of the first: "
                    "schema=first.schema",
                )


def _targets_at(built: Built, numbers: Any) -> Any:
    samples: Any = built.samples
    while hasattr(samples, "inner"):
        samples = samples.inner
    target = samples.form.targets
    if not isinstance(target, Leaf):
        return None
    values = samples.make(numbers, Buffers(), 0, Costs()).columns[target.column]
    return values if isinstance(values, np.ndarray) else None
