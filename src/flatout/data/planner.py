"""Build the program that runs from the stages that the user wrote.

Only Flatout's own stages move, and only where the batches stay the same:

- The order of rows is a function of (seed, epoch, position), and a row is found by its index. So a
  split, a filter or a shard chooses the same rows before and after a shuffle. The result of a
  stage for one row does not depend on the time when it runs.
- A cache keeps samples, never their order. So it goes before shuffles and batches.
- A user's function stays where it was written, relative to other functions and to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.batches.form import Leaf
from flatout.data.digests.digests import digest_of
from flatout.data.execution.batch_sampler import (
    DEFAULT_BATCH_SIZE,
    BatchSampler,
    Order,
    padding_share,
)
from flatout.data.execution.cache import Cached
from flatout.data.execution.featured import Numbered
from flatout.data.execution.labels import targets_of
from flatout.data.execution.program import Functions, Maker, Program
from flatout.data.execution.row_names import files_of, named_slots
from flatout.data.execution.samples import Costs, Decoded, Samples, name_of
from flatout.data.execution.stream_program import StreamProgram, StreamRows
from flatout.data.execution.varying import endless, variant, variants
from flatout.data.randomness import random_state, same_state, set_random_state
from flatout.data.reading.block import Numbers, Ragged
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.chunked import ChunkedRows
from flatout.data.reading.origins import Stream, is_rows, is_stream
from flatout.data.stages import (
    Balance,
    Batch,
    Cache,
    Options,
    Plan,
    Shard,
    Shuffle,
    Stage,
    only,
    passes,
    samples_times,
    times_of,
)
from flatout.data.workers.parallel import Tuner
from flatout.errors import DataError
from flatout.measure import usable_cpus


@dataclass
class FirstSamples:
    """Samples to which the first stage is applied.

    Attributes:
        samples: samples of the source.
        order: order of the samples; None if it is the order of their numbers.
        direct: returns unchanged batches of the samples, faster than sample by sample.
    """

    samples: Samples
    order: Order | None = None
    direct: Callable[[BatchSampler], Any] | None = None


@dataclass
class Built:
    """Program over rows by index, and the plan it was made from.

    Attributes:
        rows_to_cut: number of rows, of all ranks, from which batches are made: rows of an epoch, or
            of one pass where each pass ends with its own last batch.
    """

    plan: Plan
    program: Any
    cut: BatchSampler
    rows_to_cut: int

    @property
    def caches(self) -> list[Cached]:
        return self.plan.caches

    @property
    def runs(self) -> list[str]:
        return self.plan.runs

    @property
    def used(self) -> int:
        return self.cut.used

    @property
    def steps(self) -> int:
        return self.cut.steps

    @property
    def last_rows(self) -> int:
        """Number of rows from which the last batch is made."""
        return self.cut.samples // self.cut.passes

    @property
    def chosen(self) -> int | None:
        rows = len(self.plan.numbers)
        return rows if rows < self.plan.samples.rows else None

    def digest(self, stages: Sequence[Stage]) -> str:
        base, shard = self.plan.samples.digest, only(stages, Shard)
        # the digest is the same on all ranks, which have different rows
        if shard is not None and shard.has_own_rows:
            return digest_of("" if shard.presharded else base, shard.by, str(self.steps))
        return digest_of(base, "" if self.chosen is None else self.plan.numbers.tobytes().hex())

    def where(self, number: int) -> str:
        return self.plan.samples.where(number)

    def numbered(self) -> Numbered | str:
        """Return the samples by index, or the reason why they differ each time."""
        plan = self.plan
        if plan.blends:
            return f"{plan.blends[0].kind} makes others of whole batches"
        if plan.functions:
            return f"map {name_of(plan.functions[0])} makes others of whole batches"
        samples, numbers = plan.samples, plan.numbers
        count = variants(samples, numbers)
        if count is None:
            return endless(samples, numbers)
        block = samples.make(np.array([samples.probe], np.int64), Buffers(), 0, Costs())
        if any(isinstance(values, Ragged) for values in block.columns.values()):
            return "samples differ in length"
        which = None if count == 1 else partial(variant, samples)
        if not isinstance(self.program, Program):  # the program gives batches directly from memory
            return Numbered(samples.rows, plan.base.inputs_content, comes_whole=True)
        named = partial(named_slots, samples, count)
        files = files_of(samples)
        return Numbered(samples.rows, samples.content, count, which, named, files=files)

    def targets(self) -> npt.NDArray[Any]:
        """Return the target of each readable sample of epoch 0, in its order."""
        numbers, targets = targets_of(self.plan.samples, self.plan.numbers, "counting classes")
        order = self.cut.order(0)
        return targets[np.searchsorted(numbers, order[np.isin(order, numbers)])]

    def notes(self) -> list[str]:
        notes = [*self.plan.moved, *self.plan.notes]
        for cache in self.caches:
            where = "memory" if cache.where_kept == "memory" else "a folder"
            notes.append(f"cache in {where}: {cache.reason}")
        notes += getattr(self.program, "notes", [])
        is_in_order = self.plan.order_seed is None and only(self.plan.stages, Balance) is None
        if is_in_order and is_rows(self.plan.origin) and self._is_by_class():
            notes.append(
                "the samples are sorted by class and nothing shuffles them: batches would hold one "
                "class each; add .shuffle(seed)"
            )
        return notes

    def _is_by_class(self) -> bool:
        targets, rows = self.plan.origin.targets(), self.plan.origin.rows
        if targets is None:
            targets = self._targets_at(np.linspace(0, rows - 1, min(256, rows)).astype(np.int64))
        if targets is None or targets.ndim != 1 or targets.dtype.kind not in "iu":
            return False
        classes = len(np.unique(targets))
        return 2 <= classes > int((np.diff(targets) != 0).sum())

    def _targets_at(self, numbers: Numbers) -> Any:
        samples, target = self.plan.base, self.plan.base.form.targets
        if not isinstance(target, Leaf):
            return None
        values = samples.make(numbers, Buffers(), 0, Costs()).columns[target.column]
        return values if isinstance(values, np.ndarray) else None

    def padding(self, epoch: int) -> float | None:
        lengths = self.plan.origin.lengths() if is_rows(self.plan.origin) else None
        if lengths is None:
            return None
        return padding_share(self.cut.order(epoch), lengths, self.cut.starts())


@dataclass
class BuiltStream:
    """Program over rows that come in sequence. It has the attributes of Built."""

    stream: Stream
    stages: Sequence[Stage]
    options: Options
    say: Callable[[str], None]
    caches: list[Cached] = field(default_factory=list)
    chosen = None

    @cached_property
    def program(self) -> StreamProgram:
        for stage in self.stages:
            stage.check_stream(self.stream, self.stages)
        plan = _plan(self.stream, StreamRows(self.stream), self.stages, self.options, self.say)
        for stage in self.stages:
            stage.stream(plan)
        batch, shard = only(self.stages, Batch), only(self.stages, Shard) or Shard(0, 1)
        assert batch is not None
        size, times, turns = batch.size, times_of(self.stages), passes(self.stages)
        rows = None if self.stream.rows is None else self.stream.rows * times // turns
        return StreamProgram(
            self.stream,
            plan.samples,
            plan.steps,
            Functions(tuple(plan.functions), plan.seed, tuple(plan.blends)),
            lambda at: shard.size(at, size, rows, turns),
            drop_last=batch.last == "drop",
            times=times,
            apart=turns > 1,
        )

    @property
    def used(self) -> int | None:
        """Number of samples of a pass; None if not known."""
        rows = self.stream.rows
        for stage in self.stages:
            rows = stage.counted(rows)
        return rows

    @property
    def rows_to_cut(self) -> int | None:
        return None if self.used is None else self.used * samples_times(self.stages)

    last_rows = rows_to_cut

    @property
    def steps(self) -> int | None:
        """Number of batches of an epoch; None if not known."""
        batch, shard, rows = only(self.stages, Batch), only(self.stages, Shard), self.rows_to_cut
        if shard is not None and shard.world_size > 1:
            return shard.steps  # steps of all ranks
        if rows is None or batch is None:
            return None
        whole = rows // batch.size if batch.last == "drop" else -(-rows // batch.size)
        return passes(self.stages) * whole

    @property
    def runs(self) -> list[str]:
        return [self.stream.schema.format.lower(), *(stage.name for stage in self.stages)]

    def digest(self, stages: Sequence[Stage]) -> str:
        shard = only(stages, Shard)
        own = shard is not None and shard.has_own_rows  # the digest is the same on all ranks
        base = self.stream.schema.dumps() if own else self.stream.digest
        return digest_of(base, *(stage.name for stage in stages))

    def targets(self) -> npt.NDArray[Any]:
        raise DataError(
            "the classes of a stream cannot be counted before it has come",
            where=self.stream.describe(),
            do="pass the weights, as class_weight={0: 1.0, 1: 5.0}, or convert it to files first: "
            "flatout data convert",
        )

    def where(self, number: int) -> None:
        """Return None: the rows of a stream have no known location."""

    def notes(self) -> list[str]:
        return []

    def padding(self, epoch: int) -> None:
        """Return None: the lengths of a stream's rows are not known in advance."""


def build(
    origin: Any, stages: Sequence[Stage], options: Options, say: Callable[[str], None]
) -> Built | BuiltStream:
    if is_stream(origin):
        return BuiltStream(origin, stages, options, say)
    return build_rows(origin, stages, options, say)


def build_rows(
    origin: Any, stages: Sequence[Stage], options: Options, say: Callable[[str], None]
) -> Built:
    begun = _begun(origin, options, say)
    chosen = _plan(origin, begun.samples, stages, options, say)
    for stage in stages:
        if begun.order is not None:
            stage.check_mixed()
        stage.choose(chosen)
        if begun.order is None and len(chosen.numbers):
            chosen.base.probe = int(chosen.numbers[0])
    numbers = chosen.numbers
    if not len(numbers) and not chosen.may_be_empty:
        raise DataError("no sample is left for this rank", do="use fewer ranks, or more data")
    plan = _plan(origin, begun.samples, stages, options, say)
    plan.numbers, plan.everywhere, plan.labels = numbers, chosen.everywhere, chosen.labels
    _make(plan)
    cut = _batches(plan, begun.order)
    rows = cut.samples // cut.passes
    if plan.everywhere is not None:
        rows = plan.everywhere * samples_times(plan.stages)
    return Built(plan, _program(plan, cut, begun), cut, rows)


def of_rank(built: Built, rank: int, world_size: int) -> Built | None:
    """Return the same plan for a rank's part of each batch; both share samples and caches.

    Return None if the source gives finished batches, which have no caches.
    """
    whole = built.program
    if not isinstance(whole, Program):
        return None
    options = built.plan.options
    cut = replace(built.cut, rank=rank, world_size=world_size)
    program = Program(
        whole.maker,
        cut,
        Tuner(max(1, usable_cpus()), options.threads, options.depth),
        processes=options.processes,
        in_this_thread=whole.in_this_thread,
        repeats=whole.repeats,
    )
    return Built(built.plan, program, cut, built.rows_to_cut)


def check(stages: Sequence[Stage]) -> None:
    for kind in {type(stage): None for stage in stages if stage.once}:
        if sum(type(stage) is kind for stage in stages) > 1:
            raise DataError(
                f"{kind.__name__.lower()} stands twice in the pipeline", do="leave one of them out"
            )
    for at, stage in enumerate(stages):
        stage.check(stages[:at], stages[at + 1 :])


def _begun(origin: Any, options: Options, say: Callable[[str], None]) -> FirstSamples:
    if hasattr(origin, "begin"):
        begun: FirstSamples = origin.begin(options, say)
        return begun
    return FirstSamples(Decoded(origin if is_rows(origin) else ChunkedRows(origin)))


def _plan(
    origin: Any,
    base: Any,
    stages: Sequence[Stage],
    options: Options,
    say: Callable[[str], None],
) -> Plan:
    shuffle = only(stages, Shuffle)
    order_seed = None if shuffle is None else shuffle.seed
    seed = options.seed if order_seed is None else order_seed
    numbers = getattr(base, "numbers", None)
    if numbers is None:
        numbers = np.arange(base.rows, dtype=np.int64)
    return Plan(origin, base, stages, seed, order_seed, options, say, numbers)


def _make(plan: Plan) -> None:
    plan.runs.append(plan.base.name)
    batch = only(plan.stages, Batch)
    if batch is None:
        plan.stages = [*plan.stages, Batch(min(DEFAULT_BATCH_SIZE, len(plan.numbers)))]
    reorders = any(stage.reorders for stage in plan.stages)
    if reorders and not plan.base.random and only(plan.stages, Cache) is None:
        plan.stages = [Cache("auto"), *plan.stages]
        plan.moved.append(
            "cache was put in: the format is decoded in chunks, and rows in shuffled order would "
            "decode each chunk over and over; same batches"
        )
    for stage in plan.stages:
        stage.make(plan)
        plan.passed.append(stage)


def _batches(plan: Plan, own_order: Order | None) -> BatchSampler:
    def in_order(epoch: int) -> Numbers:
        return plan.numbers

    order, balance = own_order or in_order, only(plan.stages, Balance)
    if balance is not None:
        order = balance.balanced(plan)
    count = len(order(0)) * times_of(plan.stages)
    for stage in sorted(plan.stages, key=lambda stage: stage.turn(plan.stages)):
        order = stage.order(order, plan)
    batch = only(plan.stages, Batch)
    assert batch is not None
    batches = BatchSampler(
        count,
        batch.size,
        order,
        batch.last,
        shuffle=order is not in_order or count != plan.samples.rows,
        seed=plan.seed,
        passes=passes(plan.stages),
    )
    for stage in plan.stages:
        batches = stage.share(batches, plan)
    return batches


def _program(plan: Plan, cut: BatchSampler, begun: FirstSamples) -> Any:
    alone = cut.world_size == 1 and cut.even_steps is None and cut.passes == 1 and cut.last != "pad"
    is_changed = plan.blends or plan.functions
    if begun.direct is not None and plan.samples is plan.base and not is_changed and alone:
        return begun.direct(cut)
    options, samples = plan.options, plan.samples
    tuner = Tuner(max(1, usable_cpus()), options.threads, options.depth)
    maker = Maker(samples, tuple(plan.functions), plan.seed, tuple(plan.blends))
    draws = samples.draws or (
        bool(plan.functions) and cut.steps > 0 and _functions_draw(maker, cut)
    )
    repeats = begun.order is not None or any(stage.repeats for stage in plan.stages)
    return Program(
        maker, cut, tuner, processes=options.processes, in_this_thread=draws, repeats=repeats
    )


def _functions_draw(maker: Maker, cut: BatchSampler) -> bool:
    start, stop = cut.bounds(0)
    order = cut.order(0)
    before = [order[cut.before(0)]] if maker.functions.blends and len(order) else []
    state = random_state()
    try:
        maker(np.array([*before, *order[start:stop]], np.int64), cut.padding(0), 0, 0)
        return not same_state(state, random_state())
    finally:
        set_random_state(state)
        maker.costs = Costs()
