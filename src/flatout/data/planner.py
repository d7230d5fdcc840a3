"""From what was written to what runs.

Only Flatout's own stages move, and only where the batches stay the same:

- The order of rows is a function of (seed, epoch, place), and a row is found by its number. So a
  split, a filter or a shard before or behind a shuffle chooses the same rows, and what is made of
  one row does not depend on when it is made.
- A cache keeps samples, never their order. Behind a shuffle or a batch it would hold the same
  samples, so it goes before them, where it also holds for every later epoch. Behind a random
  function it would give every epoch the same draws, so it goes before that too.
- A user's function stays where it was written, relative to other functions and to the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.block import Numbers
from flatout.data.execution import batch_sampler as cuts
from flatout.data.execution import selection
from flatout.data.execution.array_samples import ArraySamples
from flatout.data.execution.batch_sampler import DEFAULT_BATCH_SIZE, BatchSampler
from flatout.data.execution.cache import Cached
from flatout.data.execution.parallel import Tuner
from flatout.data.execution.program import Maker, Program
from flatout.data.execution.samples import Costs, Decoded, Fetched, Joined, Mapped, Samples, name_of
from flatout.data.execution.varying import constant_part
from flatout.data.order import order as drawn_order
from flatout.data.origins import Chunks, Rows, is_chunks, is_rows
from flatout.data.randomness import random_state, same_state, set_random_state
from flatout.data.sources.arrays import Arrays, ArraySource
from flatout.data.sources.torch_dataset import DatasetRows
from flatout.data.stages import (
    Batch,
    Cache,
    Filter,
    Map,
    Normalize,
    Repeat,
    Shard,
    Shuffle,
    Split,
    Stage,
    passes,
    samples_times,
    words,
)
from flatout.errors import DataError
from flatout.measure import usable_cpus


@dataclass(frozen=True)
class Options:
    """What a pipeline may use.

    Attributes:
        threads: that make batches; None finds out while running.
        processes: that make batches, in place of threads; None uses some only where a user's Python
            holds the threads up.
        depth: batches made ahead; None means two a thread and one.
        memory: bytes that a cache may take; None means half of what is free.
        seed: of functions that draw, where no shuffle gives one.
    """

    threads: int | None = None
    processes: int | None = None
    depth: int | None = None
    memory: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Mixture:
    """Several pipelines as one source.

    Attributes:
        parts: what is mixed.
        weights: how often each is drawn; None means all rows of all.
        seed: of the draws.
    """

    parts: tuple[Any, ...]
    weights: tuple[float, ...] | None
    seed: int


@dataclass
class Built:
    """What runs, and why.

    Attributes:
        program: gives the batches; an ArraySource where nothing else is needed.
        samples: what the rows become.
        numbers: the rows that take part.
        cut: how they become batches.
        everywhere: the rows of all ranks that batches are cut from: of an epoch, or of one pass
            where each pass ends with a last batch of its own.
        runs: names of the stages that run, in their order.
        moved: what runs elsewhere than it was written, and why that is the same.
        caches: the caches in it.
    """

    program: Program | ArraySource
    samples: Samples
    numbers: Numbers
    cut: BatchSampler
    everywhere: int
    runs: list[str]
    moved: list[str] = field(default_factory=list)
    caches: list[Cached] = field(default_factory=list)


def build(
    origin: Rows | Chunks | Arrays | DatasetRows | Mixture,
    stages: Sequence[Stage],
    options: Options,
    say: Callable[[str], None],
) -> Built:
    """What runs for these stages.

    Raises:
        DataError: stages that make no sense together.
    """
    check(stages)
    base, base_order = _base(origin, options, say)
    numbers, everywhere = _select(base, origin, stages, options, say)
    if not len(numbers):
        raise DataError("no sample is left for this rank", do="use fewer ranks, or more data")
    moved: list[str] = []
    caches: list[Cached] = []
    samples, runs = _chain(base, numbers, stages, options, say, moved, caches)
    cut = _cut(samples, origin, numbers, everywhere, stages, base_order)
    own_rows = cut.even_steps is not None
    uncut = everywhere * samples_times(stages) if own_rows else cut.samples // cut.passes
    functions = tuple(stage.function for stage in _behind_batch(stages) if isinstance(stage, Map))
    batched = ["batch", *(f"map {name_of(function)}" for function in functions)]
    repeats = ["repeat"] if _only(stages, Repeat) else []
    order = ["shuffle"] if _only(stages, Shuffle) else []
    names = [*runs, *order, *(batched + repeats if cut.passes > 1 else repeats + batched)]
    if isinstance(base, ArraySamples) and samples is base and not functions and _plain(cut):
        source = ArraySource(base.data, cut)
        return Built(source, samples, numbers, cut, uncut, names, moved, caches)
    tuner = Tuner(max(1, usable_cpus()), options.threads, options.depth)
    maker = Maker(samples, functions, _seed(stages, options))
    draws = samples.draws or (bool(functions) and cut.steps > 0 and _functions_draw(maker, cut))
    program = Program(
        maker,
        cut,
        tuner,
        processes=options.processes,
        in_this_thread=draws,
    )
    return Built(program, samples, numbers, cut, uncut, names, moved, caches)


def check(stages: Sequence[Stage]) -> None:
    """Refuse stages that make no sense together."""
    for kind in (Shuffle, Batch, Shard, Repeat, Normalize):
        if sum(isinstance(stage, kind) for stage in stages) > 1:
            raise DataError(
                f"{kind.__name__.lower()} stands twice in the pipeline", do="leave one of them out"
            )
    shard, turns = _only(stages, Shard), passes(stages)
    if shard is not None and shard.steps is not None and shard.steps % turns:
        raise DataError(
            f"shard(presharded=True, steps={shard.steps:,}) cannot be shared out alike among the "
            f"{turns:,} passes of repeat, which stands behind batch",
            do=f"pass a multiple of {turns:,} as steps, or put repeat before batch",
        )
    is_normal = False
    for stage in stages:
        is_normal = is_normal or isinstance(stage, Normalize)
        if is_normal and isinstance(stage, (Map, Filter)):
            raise DataError(
                f"{words(stage)} stands behind normalize, which runs last: its function would get "
                "bytes",
                do=f"put {words(stage)} before normalize",
            )
    for stage in _behind_batch(stages):
        if isinstance(stage, Filter):
            raise DataError(
                "filter stands behind batch, where it would leave out whole batches",
                do="put filter before batch",
            )


def _base(
    origin: Rows | Chunks | Arrays | DatasetRows | Mixture,
    options: Options,
    say: Callable[[str], None],
) -> tuple[Decoded | Fetched | ArraySamples | Joined, cuts.Order | None]:
    """Where samples begin, and their own order where the origin has one."""
    if isinstance(origin, Arrays):
        return ArraySamples(origin), None
    if isinstance(origin, DatasetRows):
        return Fetched(origin.dataset, origin.digest), None
    if isinstance(origin, Mixture):
        return _mixture(origin, options, say)
    if is_rows(origin):
        return Decoded(origin), None
    from flatout.data.chunked import ChunkedRows

    assert is_chunks(origin)
    return Decoded(ChunkedRows(origin)), None


def _mixture(
    origin: Mixture, options: Options, say: Callable[[str], None]
) -> tuple[Joined, cuts.Order]:
    for part in origin.parts:
        for stage in part.stages:
            if isinstance(stage, Shard) and not stage.has_own_rows:
                raise DataError("shard stands before mix", do="put shard behind mix")
    parts = [build(part.origin, part.stages, options, say) for part in origin.parts]
    joined = Joined([part.samples for part in parts], [part.numbers for part in parts])
    orders: list[cuts.Order] = []
    for part, start in zip(parts, joined.starts, strict=False):
        orders.append(lambda epoch, own=part.cut.order, at=int(start): own(epoch) + at)  # type: ignore[misc]
    sizes = [part.cut.samples for part in parts]
    if origin.weights is None:
        counts = sizes
    else:
        total = min(size / weight for size, weight in zip(sizes, origin.weights, strict=True))
        counts = [int(total * weight + 1e-9) for weight in origin.weights]
    if min(counts) < 1:
        raise DataError(f"mixing {sizes} samples by {origin.weights} leaves a source without any")
    return joined, cuts.mixed(orders, counts, sizes, origin.seed)


def _select(
    base: Decoded | Fetched | ArraySamples | Joined,
    origin: Any,
    stages: Sequence[Stage],
    options: Options,
    say: Callable[[str], None],
) -> tuple[Numbers, int]:
    """The rows that take part, in ascending order, and how many there are on all ranks."""
    numbers = base.numbers if isinstance(base, Joined) else np.arange(base.rows, dtype=np.int64)
    samples: Samples = base
    everywhere = None
    batch_at = _batch_at(stages)
    for at, stage in enumerate(stages):
        if isinstance(origin, Mixture):
            _check_behind_mix(stage)
        if isinstance(stage, Map) and at < batch_at:
            samples = Mapped(samples, stage.function, _seed(stages, options))
        elif isinstance(stage, Filter):
            numbers = selection.filtered(numbers, samples, stage.function, say)
        elif isinstance(stage, Split):
            labels = None
            if stage.stratify:
                known = origin.targets() if is_rows(origin) and samples is base else None
                labels = selection.labels_of(numbers, samples, known)
            numbers = selection.split(numbers, stage, labels)
        elif isinstance(stage, Shard) and stage.has_own_rows:
            everywhere = len(numbers)
            numbers = selection.shard(numbers, stage, getattr(origin, "file_rows", None))
        if not isinstance(base, Joined) and len(numbers):
            base.first = int(numbers[0])
    return numbers, len(numbers) if everywhere is None else everywhere


def _check_behind_mix(stage: Stage) -> None:
    if isinstance(stage, Shuffle) and stage.window is not None:
        raise DataError(
            "shuffle(window=...) stands behind mix", do="shuffle each source before mix"
        )
    chooses = isinstance(stage, (Filter, Split)) or (
        isinstance(stage, Shard) and stage.has_own_rows
    )
    if chooses:
        raise DataError(
            f"{words(stage)} stands behind mix", do=f"{words(stage)} each source before it"
        )


def _chain(
    base: Samples,
    numbers: Numbers,
    stages: Sequence[Stage],
    options: Options,
    say: Callable[[str], None],
    moved: list[str],
    caches: list[Cached],
) -> tuple[Samples, list[str]]:
    """What becomes of a row before it comes into a batch."""
    samples = base
    runs = [base.name]
    written_cache = any(isinstance(stage, Cache) for stage in stages)
    if not base.random and not written_cache and any(_reorders(stage) for stage in stages):
        stages = [Cache("auto"), *stages]
        moved.append(
            "cache was put in: the format is decoded in chunks, and rows in shuffled order would "
            "decode each chunk over and over; same batches"
        )
    batch_at = _batch_at(stages)
    for at, stage in enumerate(stages):
        if isinstance(stage, Map) and at < batch_at:
            samples = Mapped(samples, stage.function, _seed(stages, options))
            runs.append(samples.name)
        elif isinstance(stage, Cache):
            kept, behind = constant_part(samples, numbers)
            if kept is None:
                moved.append(
                    f"cache was left out: {base.name} is random, and a cache would give every "
                    "epoch the same samples"
                )
                continue
            if isinstance(kept, ArraySamples) or (behind and isinstance(kept, Cached)):
                moved.append(_left_out(behind))
                continue
            if behind:
                moved.append(_moved(behind))
            before = [words(s) for s in stages[:at] if isinstance(s, (Shuffle, Batch, Repeat))]
            if before:
                moved.append(
                    f"cache before {' and '.join(before)}: same batches, because order depends on "
                    "(seed, epoch, counter) alone"
                )
            if any(isinstance(s, Map) for s in stages[batch_at:at]):
                moved.append(
                    "cache before the functions of whole batches, which run in every epoch: the "
                    "batches of each epoch are others"
                )
            folder = None if stage.folder is None else Path(stage.folder)
            cached = Cached(
                kept, numbers, stage.where, budget=options.memory, folder=folder, say=say
            )
            samples = cached
            for one in behind:
                samples = Mapped(samples, one.function, one.seed)
            caches.append(cached)
            runs.insert(len(runs) - len(behind), "CACHE")
    return samples, runs


def _left_out(behind: Sequence[Mapped]) -> str:
    """Why there is no cache, where what it could hold is there already."""
    if not behind:
        return "cache was left out: the samples are in memory already"
    return (
        f"cache was left out: {behind[0].name} is random and runs in every epoch, and the samples "
        "before it are in memory already"
    )


def _moved(behind: Sequence[Mapped]) -> str:
    """Why a cache runs before the first random function."""
    names = " and ".join(one.name for one in behind)
    return (
        f"cache before {names}: {behind[0].name} is random, and a cache behind it would give every "
        "epoch the same samples"
    )


def _cut(
    samples: Samples,
    origin: Any,
    numbers: Numbers,
    everywhere: int,
    stages: Sequence[Stage],
    base_order: cuts.Order | None,
) -> BatchSampler:
    """Order and batches."""
    shuffle = _only(stages, Shuffle)
    batch = _only(stages, Batch) or Batch(min(DEFAULT_BATCH_SIZE, len(numbers)))
    shard = _only(stages, Shard) or Shard(0, 1)
    repeat = _only(stages, Repeat)
    times, turns = 1 if repeat is None else repeat.times, passes(stages)
    if base_order is not None:
        order, count = base_order, len(base_order(0))
        if shuffle is not None:
            order = _shuffled_again(order, shuffle.seed)
    else:
        count = len(numbers)
        if shuffle is None:
            order = cuts.in_order(numbers)
        elif shuffle.window is None:
            order = cuts.shuffled(numbers, shuffle.seed)
        else:
            order = cuts.shuffled_in_windows(numbers, shuffle.seed, shuffle.window)
    if times > turns:
        order = cuts.repeated(order, times)
    if batch.window is not None:
        lengths = origin.lengths() if is_rows(origin) else None
        if lengths is None:
            raise DataError(
                "batch(by_length=...) wants ragged rows whose lengths are known beforehand, as of "
                "LibSVM and TFRecord files with a ragged column"
            )
        seed = None if shuffle is None else shuffle.seed
        order = cuts.by_length(order, lengths, batch.size, batch.window, seed)
    if turns > 1:
        order = cuts.repeated(order, turns)
    count *= times
    if not shard.has_own_rows:
        in_place = shuffle is None and batch.window is None and repeat is None
        moves = not (in_place and base_order is None and count == samples.rows)
        return BatchSampler(
            count,
            batch.size,
            order,
            batch.last,
            shard.rank,
            shard.world_size,
            shuffle=moves,
            passes=turns,
        )
    if shard.presharded:
        if shard.steps is None:
            raise DataError(
                "shard(presharded=True): no rank knows how many samples the others have",
                do="hand the pipeline to a Trainer, whose ranks find it out, or pass steps=, the "
                "same on every rank: samples of all ranks / batch size, rounded up",
            )
        return BatchSampler(
            count, batch.size, order, batch.last, even_steps=shard.steps, passes=turns
        )
    steps = turns * max(1, -(-everywhere * samples_times(stages) // batch.size))
    return BatchSampler(count, batch.size, order, batch.last, even_steps=steps, passes=turns)


def _shuffled_again(inner: cuts.Order, seed: int) -> cuts.Order:
    def again(epoch: int) -> Numbers:
        numbers = inner(epoch)
        return numbers[drawn_order(len(numbers), seed, epoch)]

    return again


def _batch_at(stages: Sequence[Stage]) -> int:
    """Where batch stands, or the end."""
    return next((at for at, s in enumerate(stages) if isinstance(s, Batch)), len(stages))


def _behind_batch(stages: Sequence[Stage]) -> Sequence[Stage]:
    return stages[_batch_at(stages) + 1 :]


def _only(stages: Sequence[Stage], kind: type[Any]) -> Any:
    return next((stage for stage in stages if isinstance(stage, kind)), None)


def _reorders(stage: Stage) -> bool:
    return isinstance(stage, Shuffle) or (isinstance(stage, Batch) and stage.window is not None)


def _plain(cut: BatchSampler) -> bool:
    alone = cut.world_size == 1 and cut.even_steps is None
    return alone and cut.passes == 1 and cut.last != "pad"


def _functions_draw(maker: Maker, cut: BatchSampler) -> bool:
    """Whether a user's function of whole batches draws from a global generator, by trying it."""
    start, stop = cut.bounds(0)
    before = random_state()
    try:
        maker(cut.order(0)[start:stop], cut.padding(0), 0, 0)
        return not same_state(before, random_state())
    finally:
        set_random_state(before)
        maker.costs = Costs()


def _seed(stages: Sequence[Stage], options: Options) -> int:
    shuffle = _only(stages, Shuffle)
    return options.seed if shuffle is None else int(shuffle.seed)
