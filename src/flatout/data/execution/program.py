"""Program of a pipeline over numbered rows: cuts, makes and returns batches in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from time import perf_counter_ns as clock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.augmentation.blend import Blend
from flatout.data.batches.batch import Batch
from flatout.data.batches.tensors import as_batch
from flatout.data.execution.batch_sampler import BatchSampler, Orders
from flatout.data.execution.claims import Claims, NoneLeft, cuts_of
from flatout.data.execution.featured import FeatureRows
from flatout.data.execution.samples import (
    Costs,
    Samples,
    check_takes,
    first_good,
    name_of,
    sample_rng,
    takes_rng,
)
from flatout.data.execution.turns import Turns, turns_at, turns_left, turns_of
from flatout.data.randomness import batch_seed, seeded
from flatout.data.reading.block import Block, Numbers, rows_between, take
from flatout.data.reading.buffers import Buffers
from flatout.data.workers.parallel import Ahead, Tuner
from flatout.data.workers.process_pool import ProcessPool, Repay, refusal
from flatout.data.workers.worker import WorkerDied
from flatout.errors import DataError, FlatoutError
from flatout.words import rounded

# Nanoseconds to make a batch, below which batches are made when needed: passing a batch from one
# thread to another would take as long.
_QUICK_NS = 100_000
# Nanoseconds of a run. Batches that can be made within this time are made in one call, so that
# Python's overhead, which threads cannot divide, occurs once for all batches of the run.
_RUN_NS = 4_000_000
# Maximum number of batches of a run.
_LONGEST_RUN = 16
# Maximum number of batches that are measured to find the cost of a batch.
_FIRST = 5
# Fraction of a batch's time spent in the user's Python code from which on processes may help.
_PYTHON = 0.5

# Row indices of a batch, with the row before them first if the batch is blended; number of
# additional rows of weight 0; epoch; step; a store that has features of some rows; turns, or None.
Task: TypeAlias = tuple[Numbers, int, int, int, FeatureRows | None, Numbers | None]


class Maker:
    """Makes batches. It can be sent to another process."""

    def __init__(
        self,
        samples: Samples,
        functions: tuple[Callable[..., Any], ...],
        seed: int,
        blends: tuple[Blend, ...] = (),
    ) -> None:
        self.samples = samples
        self.functions = Functions(functions, seed, blends)
        self.seed = seed
        self.costs = Costs()
        self._buffers = Buffers()

    def __call__(
        self,
        numbers: Numbers,
        padding: int,
        epoch: int,
        step: int,
        features: FeatureRows | None = None,
        turns: Numbers | None = None,
    ) -> Batch:
        """Return the batch of these rows, and of `padding` additional rows of weight 0."""
        when: Turns = epoch if turns is None else turns
        if features is not None and len(numbers) and not padding:
            there = features.has(numbers, when)
            if there.any():
                return self._with_features(features, numbers, there, when)
        led = False
        if self.functions.blends:
            # The row before the first row of a whole batch is the batch's own last row.
            led = len(numbers) > 1 and (padding > 0 or bool(numbers[0] != numbers[-1]))
            numbers, when = (
                (numbers, when) if led else (numbers[1:], turns_at(when, slice(1, None)))
            )
        block = self.samples.make(numbers, self._buffers, when, self.costs)
        when = turns_left(when, numbers, block.numbers)
        # The row before the batch is missing if that row, or all rows of the batch, cannot be read.
        led = led and len(block) > 0 and bool(block.numbers[0] == numbers[0])
        if led and len(block) == 1:
            block, led = rows_between(block, 1, 1), False
        return self._batch(block, padding, epoch, step, when, led)

    def _with_features(
        self, features: FeatureRows, numbers: Numbers, there: npt.NDArray[np.bool_], when: Turns
    ) -> Batch:
        form, made = self.samples.form, None
        if not there.all():
            turns = turns_at(when, ~there)
            block = self.samples.make(numbers[~there], self._buffers, turns, self.costs)
            made = form.batch(block, self._buffers) if len(block) else None
        began = clock()
        batch = features.batch(numbers, there, when, made, form)
        self.costs.add("features", clock() - began)
        self.costs.batches += 1
        return batch

    def run(self, tasks: Sequence[Task]) -> list[Batch | Exception]:
        """Return the batches of several tasks of an epoch, whose rows are read at once.

        An error ends the list, at the position of its batch.
        """
        made: list[Batch | Exception] = []
        try:
            blocks = self._blocks(tasks)
            for at, task in enumerate(tasks):
                if blocks is None:
                    made.append(self(*task))
                else:
                    block, when = blocks[at]
                    made.append(self._batch(block, *task[1:4], when))
        except Exception as error:
            made.append(error)
        return made

    def _blocks(self, tasks: Sequence[Task]) -> list[tuple[Block, Turns]] | None:
        if len(tasks) == 1 or tasks[0][4] is not None or self.functions.blends:
            return None
        numbers, turns = np.concatenate([task[0] for task in tasks]), [task[5] for task in tasks]
        known = [turn for turn in turns if turn is not None]
        when: Turns = np.concatenate(known) if len(known) == len(tasks) else tasks[0][2]
        try:
            block = self.samples.make(numbers, self._buffers, when, self.costs)
        except Exception:
            return None  # batches are then made singly, and the error is raised for its batch
        when = turns_left(when, numbers, block.numbers)
        ends = _ends(block.numbers, [task[0] for task in tasks])
        return [
            (rows_between(block, start, stop), turns_at(when, slice(start, stop)))
            for start, stop in pairwise([0, *ends])
        ]

    def _batch(
        self, block: Block, padding: int, epoch: int, step: int, when: Turns, led: bool = False
    ) -> Batch:
        began = clock()
        if not len(block):
            # All rows are bad, or belong to other ranks. The number of batches stays the same.
            block = self._filler(epoch, step)
            padding, when = max(1, padding), epoch
            block = take(block, np.zeros(padding, np.int64))
        elif padding:
            places = np.arange(len(block) + padding) % len(block)
            block, when = take(block, places), turns_at(when, places)
        batch = self.samples.form.batch(block, self._buffers)
        if not isinstance(when, int):
            batch = batch._replace(turns=torch.from_numpy(when))
        self.costs.add("batch", clock() - began)
        self.costs.batches += 1
        made = self.functions(batch, epoch, step, self.costs, led)
        return _padded(made, batch.size - led, padding, epoch, step) if padding else made

    def _filler(self, epoch: int, step: int) -> Block:
        block = first_good(self.samples, self._buffers, epoch, self.costs)
        if not len(block):
            raise DataError(f"batch {step:,} of epoch {epoch}: all rows are bad")
        return block

    def seeded(self, *task: Any) -> Batch:
        """Make the batch of a Task with global generators seeded from (seed, epoch, step)."""
        with seeded(batch_seed(self.seed, *task[2:4])):
            return self(*task)


class _Wanted(NamedTuple):
    """The batches that are still wanted of an epoch.

    Attributes:
        task: returns the task of a batch.
        step: index of the next batch.
        steps: index after the last batch.
        ahead: returns the maximum number of batches to make ahead; None: the tuner decides.
    """

    task: Callable[[int], Task]
    step: int
    steps: int
    ahead: Callable[[], int] | None


class Program:
    """Batches of numbered rows. Batch k of epoch e depends on (e, k) alone."""

    def __init__(
        self,
        maker: Maker,
        cut: BatchSampler,
        tuner: Tuner,
        *,
        processes: int | None,
        in_this_thread: bool,
        repeats: bool = False,
    ) -> None:
        self.maker = maker
        self.cut = cut
        self.tuner = tuner
        self.in_this_thread = in_this_thread
        self.repeats = repeats
        self._orders = Orders(cut)
        self.quick: bool | None = None
        self._seen, self._cost = 0, 2**63
        self.pool: ProcessPool | None = None
        self.notes: list[str] = []
        self._asked = processes is not None
        self._tried = self._asked
        self.repay = Repay()
        if processes:
            if reason := refusal(maker):
                raise DataError(f"options(processes={processes}): {reason}")
            self.pool = ProcessPool(maker, processes)

    @property
    def costs(self) -> Costs:
        return self.maker.costs

    def claimed(
        self, epoch: int, claims: Claims, features: FeatureRows | None = None
    ) -> Iterator[Batch]:
        """Yield the parts of an epoch's batches that a rank claims, from the first unused one."""
        with suppress(NoneLeft):
            yield from self.batches(epoch, claims.used, features, claims)

    def batches(
        self,
        epoch: int,
        start_step: int,
        features: FeatureRows | None = None,
        claims: Claims | None = None,
    ) -> Iterator[Batch]:
        if claims is None:
            self.cut.first(start_step)
        order = self._orders.of(epoch)
        turns = turns_of(order, epoch) if self.repeats else None
        # A rank that has claimed all parts asks once more, as other ranks do, and then gets none.
        steps = self.cut.steps if claims is None else self.cut.steps * claims.parts + 1
        middle = (start_step + self.cut.steps) // 2
        cuts = [] if claims is None else cuts_of(self.cut, claims.parts)
        uses_pool = self.pool is not None
        if uses_pool and features is not None:
            # Processes have no store. They are not needed if all samples have features.
            uses_pool = not features.has(order, epoch if turns is None else turns).all()
            features = None if uses_pool else features

        def task(step: int) -> Task:
            if step == middle:
                self._orders.prepare(epoch + 1)
            cut = self.cut
            if claims is not None:
                claim = claims.at(step)
                if claim is None:
                    raise NoneLeft
                step, cut = claim.step, cuts[claim.part]
            start, stop = cut.bounds(step)
            numbers, own = order[start:stop], None if turns is None else turns[start:stop]
            if self.maker.functions.blends and len(order):
                before = cut.before(step)
                numbers = np.insert(numbers, 0, order[before])
                own = None if turns is None else np.insert(turns[start:stop], 0, turns[before])
            return numbers, cut.padding(step), epoch, step, features, own

        wanted = _Wanted(task, start_step, steps, None if claims is None else claims.ahead)
        if self.pool is not None and uses_pool:
            return self._by_pool(self.pool, wanted)
        if self.in_this_thread:
            return (self.maker.seeded(*task(step)) for step in range(start_step, steps))
        return self._by_threads(epoch, wanted)

    def _by_pool(self, pool: ProcessPool, wanted: _Wanted) -> Iterator[Batch]:
        asked: dict[int, Numbers] = {}
        step = wanted.step

        def noted(at: int) -> Task:
            result = wanted.task(at)
            asked[at] = result[0][1:] if self.maker.functions.blends else result[0]
            return result

        self.repay.begin()
        try:
            with closing(pool.batches(noted, *wanted[1:])) as made:
                for batch in made:
                    self._count_skipped(asked.pop(step), batch)
                    step += 1
                    yield batch
                    del batch
                    if not self._asked and self._pool_loses(pool):
                        break
        except WorkerDied as death:
            if self._asked:
                raise
            # Threads make the same batches, and made them before.
            self.notes.append(f"threads again: {death.what}")
            self.pool = None
        if self.pool is None:
            pool.close()
            yield from self._ahead(wanted._replace(step=step))

    def _count_skipped(self, asked: Numbers, batch: Batch) -> None:
        """Also skip here the rows that a process has skipped, since this process counts them."""
        if batch.indices is not None and batch.samples < len(asked):
            left = np.setdiff1d(asked, batch.indices.numpy()[: batch.samples])
            self.maker.samples.make(left, Buffers(), 0, Costs())

    def _pool_loses(self, pool: ProcessPool) -> bool:
        """Count a used batch; return True if processes that the user did not set are not faster."""
        if not pool.started:
            self.repay.begin()
            return False
        self.repay.process_made()
        if not self.repay.loses():
            return False
        self.notes.append(
            f"threads again: {rounded(1e3 * self.repay.thread_s)} ms a batch, where "
            f"{pool.count} processes took {rounded(1e3 * self.repay.process_s)} ms"
        )
        self.pool = None
        return True

    def _by_threads(self, epoch: int, wanted: _Wanted) -> Iterator[Batch]:
        self.repay.begin()
        yield from self._ahead(wanted)
        self.repay.threads_made(wanted.steps - wanted.step)
        self._consider_processes(epoch)

    def _ahead(self, wanted: _Wanted) -> Iterator[Batch]:
        task, step, steps, _ = wanted
        # The cost of a batch decides how batches are made. The first batch opens files and fills
        # pools, so the next batches are measured; if they cost much, two are enough.
        while step < steps and (self.quick or self.quick is None):
            start = clock()
            batch = self.maker(*task(step))
            if self.quick is None:
                self._judge(clock() - start)
            step += 1
            yield batch
            del batch
        if step < steps:
            yield from self._in_runs(*wanted._replace(step=step))

    def _judge(self, cost: int) -> None:
        self._seen += 1
        if self._seen > 1:
            self._cost = min(self._cost, cost)
            # Two expensive batches are measured: the garbage collector may have run in one of them.
            if self._seen == _FIRST or (self._seen > 2 and self._cost > _RUN_NS):
                self.quick = self._cost < _QUICK_NS

    def _in_runs(
        self,
        task: Callable[[int], Task],
        step: int,
        steps: int,
        ahead: Callable[[], int] | None,
    ) -> Iterator[Batch]:
        # Parts claimed long before their step would be missing to ranks that have none left.
        size = self._at_once(steps - step) if ahead is None else 1

        def make(run: int) -> list[Batch | Exception]:
            first = step + run * size
            return self.maker.run([task(at) for at in range(first, min(first + size, steps))])

        made_ahead = Ahead(make, 0, -(-(steps - step) // size), self.tuner, size, ahead)
        with closing(iter(made_ahead)) as runs:
            for run in runs:
                run.reverse()
                while run:
                    made = run.pop()
                    if isinstance(made, Exception):
                        raise made
                    yield made
                    del made

    def _at_once(self, steps: int) -> int:
        if self.tuner.given_depth:
            return 1
        most = min(_LONGEST_RUN, steps // (4 * self.tuner.budget))
        cost = min(self._cost, sum(self.costs.ns.values()) // max(1, self.costs.batches))
        return max(1, min(most, _RUN_NS // max(1, cost)))

    def _consider_processes(self, epoch: int) -> None:
        if self._tried or self.tuner.fixed or not self.tuner.in_vain:
            return
        waited = self.tuner.waited_so_far or 0.0
        if not self.repay.may_pay(epoch, self.cut.steps, waited, self.tuner.budget):
            return
        costs = self.costs.ns
        python = {name: ns for name, ns in costs.items() if name.startswith(("map ", "fetch "))}
        if sum(python.values()) < _PYTHON * sum(costs.values()):
            return
        slowest = max(python, key=python.__getitem__)
        reason = refusal(self.maker)
        self.tuner.in_vain = False
        if reason:
            self.notes.append(
                f"{slowest} is Python that threads cannot share; no processes: {reason}"
            )
            return
        self.pool, self._tried = ProcessPool(self.maker, self.tuner.budget), True
        self.notes.append(f"{self.tuner.budget} processes, forced by {slowest}: Python in threads")


class Functions:
    """Functions of whole batches: a blend of their samples, then a user's functions in turn.

    A function gets inputs, or inputs and targets, or also the weight. If it has a parameter `rng`,
    it also gets a numpy Generator that depends on (seed, epoch, batch) alone.
    """

    def __init__(
        self,
        functions: tuple[Callable[..., Any], ...],
        seed: int,
        blends: tuple[Blend, ...] = (),
    ) -> None:
        self.blends = blends
        self._functions = [(f, f"map {name_of(f)}", takes_rng(f)) for f in functions]
        # Samples and batches have equal indices, so their seeds must differ.
        self._seed = seed + 1

    def __call__(
        self, batch: Batch, epoch: int, step: int, costs: Costs, led: bool = False
    ) -> Batch:
        """Apply the functions. With `led`, the first row is only blended into the next row."""
        if self.blends:
            began = clock()
            # A third key, since functions draw with the key above.
            rng = sample_rng(self._seed + 1, epoch, step)
            blend = self.blends[int(rng.integers(len(self.blends)))]
            batch = blend(batch, rng, led)
            costs.add(blend.kind, clock() - began)
        for function, name, wants_rng in self._functions:
            began = clock()
            given = {"rng": sample_rng(self._seed, epoch, step)} if wants_rng else {}
            try:
                value = function(*parts(batch), **given)
            except FlatoutError:
                raise
            except Exception as error:
                check_takes(function, name, len(parts(batch)), error)
                error.add_note(f"in {name} of batch {step:,} of epoch {epoch}")
                raise
            made = as_batch(value, f"epoch {epoch}, batch {step}, made by {name}")
            # If a function leaves out or adds samples, the numbers no longer fit.
            batch = made._replace(indices=batch.indices if made.size == batch.size else None)
            costs.add(name, clock() - began)
        return batch


def _ends(found: Numbers, asked: Sequence[Numbers]) -> list[int]:
    ends: list[int] = np.cumsum([len(numbers) for numbers in asked]).tolist()
    if ends[-1] == len(found):
        return ends
    ends, here = [], 0
    for numbers in asked:
        for number in numbers:
            here += bool(here < len(found) and found[here] == number)
        ends.append(here)
    return ends


def parts(batch: Batch) -> tuple[Any, ...]:
    """Return the arguments of a batch's function: inputs, or also targets, or also the weight."""
    if batch.weight is not None:
        return batch.inputs, batch.targets, batch.weight
    return (batch.inputs,) if batch.targets is None else (batch.inputs, batch.targets)


def _padded(batch: Batch, rows: int, padding: int, epoch: int, step: int) -> Batch:
    if batch.is_jagged:
        raise DataError(
            f"batch {step:,} of epoch {epoch}: {padding:,} samples only fill it up, and its inputs "
            "have no row for each sample by which these could be left out again",
            do='write batch(last="keep") or batch(last="drop")',
        )
    if batch.size != rows:
        raise DataError(
            f"batch {step:,} of epoch {epoch}: a function made {batch.size:,} rows of {rows:,}, of "
            f"which {padding:,} only fill it up",
            do='with batch(last="pad"), leave rows out by .filter(f) in front of .batch',
        )
    weight = torch.ones(batch.size) if batch.weight is None else batch.weight.clone()
    weight[batch.size - padding :] = 0
    return batch._replace(weight=weight, padding=padding)
