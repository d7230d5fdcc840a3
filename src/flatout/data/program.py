"""What runs for a pipeline over numbered rows: cut, make, hand out in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
import torch

from flatout.data.batch import Batch
from flatout.data.block import Numbers
from flatout.data.buffers import Buffers
from flatout.data.crew import Crew, refusal
from flatout.data.cut import Cut
from flatout.data.order import batch_seed
from flatout.data.parallel import Ahead, Tuner
from flatout.data.randomness import seeded
from flatout.data.samples import Costs, Samples, name_of, sample_rng, takes_rng
from flatout.data.tensors import as_batch
from flatout.errors import FlatoutError

# A batch that is made quicker than this is made when it is asked for: handing it from one thread to
# another would cost as much.
_QUICK_NS = 100_000
# From this share of a batch's time on, the user's Python is what threads cannot help with.
_PYTHON = 0.5
# How much faster processes must be than threads to be kept.
_WORTH = 1.03


class Maker:
    """Makes one batch. It can be sent to another process.

    Args:
        samples: what the rows become.
        functions: the user's functions of whole batches, in their order.
        seed: of what functions draw.
    """

    def __init__(
        self, samples: Samples, functions: tuple[Callable[..., Any], ...], seed: int
    ) -> None:
        self.samples = samples
        self.functions = Functions(functions, seed)
        self.seed = seed
        self.costs = Costs()
        self._buffers = Buffers()

    def __call__(self, numbers: Numbers, padding: int, epoch: int, step: int) -> Batch:
        """The batch of these rows, and of `padding` more that weigh nothing."""
        if padding:
            numbers = np.concatenate([numbers, np.resize(numbers, padding)])
        block = self.samples.make(numbers, self._buffers, epoch, self.costs)
        began = clock()
        batch = self.samples.form.batch(block, self._buffers)
        if padding:
            batch = batch._replace(weight=_weight(batch, padding))
        self.costs.add("batch", clock() - began)
        self.costs.batches += 1
        return self.functions(batch, epoch, step, self.costs)

    def seeded(self, numbers: Numbers, padding: int, epoch: int, step: int) -> Batch:
        """The same, with the global generators seeded from (seed, epoch, step) meanwhile."""
        with seeded(batch_seed(self.seed, epoch, step)):
            return self(numbers, padding, epoch, step)


class Program:
    """Batches of numbered rows: batch k of epoch e is a function of (e, k) alone.

    Args:
        maker: makes a batch.
        cut: which rows form which batch.
        tuner: how many threads.
        processes: how many processes make batches, instead of threads; None tries them by itself
            where a user's Python holds the threads up.
        in_this_thread: a function draws from the global generators, so no other thread of this
            process may run it.
    """

    def __init__(
        self,
        maker: Maker,
        cut: Cut,
        tuner: Tuner,
        *,
        processes: int | None,
        in_this_thread: bool,
    ) -> None:
        self.maker = maker
        self.cut = cut
        self.tuner = tuner
        self.in_this_thread = in_this_thread
        self.quick: bool | None = None
        self.crew: Crew | None = None
        self.notes: list[str] = []
        self._asked = processes is not None
        self._tried = self._asked
        if processes:
            self.crew = Crew(maker, processes)

    @property
    def costs(self) -> Costs:
        """What the stages took in this process."""
        return self.maker.costs

    def batches(self, epoch: int, start_step: int) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on."""
        self.cut.first(start_step)
        order = self.cut.order(epoch)
        steps = self.cut.steps

        def task(step: int) -> tuple[Numbers, int, int, int]:
            start, stop = self.cut.bounds(step)
            return order[start:stop], self.cut.padding(step), epoch, step

        if self.crew is not None and self._crew_is_worth_it():
            return self.crew.batches(task, start_step, steps)
        if self.in_this_thread:
            return (self.maker.seeded(*task(step)) for step in range(start_step, steps))
        return self._ahead(lambda step: self.maker(*task(step)), start_step, steps)

    def _ahead(self, make: Callable[[int], Batch], step: int, steps: int) -> Iterator[Batch]:
        # The second batch tells what one costs: the first opens files and fills pools.
        seen = 0
        while step < steps and (self.quick or (self.quick is None and seen < 2)):
            start = clock()
            batch = make(step)
            if self.quick is None and seen == 1:
                self.quick = clock() - start < _QUICK_NS
            seen += 1
            step += 1
            yield batch
            del batch
        if step < steps:
            yield from Ahead(make, step, steps, self.tuner)
            self._consider_processes()

    def _crew_is_worth_it(self) -> bool:
        """Whether processes that nobody asked for were faster than the threads before them."""
        assert self.crew is not None
        if self._asked or not self.crew.rate or self.crew.rate > _WORTH * self.tuner.rate:
            return True
        self.notes.append(
            f"threads again: processes made {self.crew.rate:.3g} batches a second, "
            f"threads {self.tuner.rate:.3g}"
        )
        self.crew.close()
        self.crew = None
        return False

    def _consider_processes(self) -> None:
        """Between epochs: are threads held up by a user's Python that processes could share?"""
        if self._tried or self.tuner.fixed or not self.tuner.in_vain:
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
        self.crew, self._tried = Crew(self.maker, self.tuner.budget), True
        self.notes.append(f"{self.tuner.budget} processes, forced by {slowest}: Python in threads")


class Functions:
    """A user's functions of whole batches, one after the other.

    A function gets inputs, or inputs and targets, or with the weight; and `rng=`, a numpy Generator
    that depends on (seed, epoch, batch) alone, if it has a parameter of that name.
    """

    def __init__(self, functions: tuple[Callable[..., Any], ...], seed: int) -> None:
        self._functions = [(f, f"map {name_of(f)}", takes_rng(f)) for f in functions]
        # Another key than that of samples, whose numbers would be the same.
        self._seed = seed + 1

    def __call__(self, batch: Batch, epoch: int, step: int, costs: Costs) -> Batch:
        """What the functions make of a batch."""
        for function, name, wants_rng in self._functions:
            began = clock()
            given = {"rng": sample_rng(self._seed, epoch, step)} if wants_rng else {}
            try:
                value = function(*parts(batch), **given)
            except FlatoutError:
                raise
            except Exception as error:
                error.add_note(f"in {name} of batch {step:,} of epoch {epoch}")
                raise
            made = as_batch(value, f"epoch {epoch}, batch {step}, made by {name}")
            # A function that leaves out or adds samples breaks the tie to their numbers.
            batch = made._replace(indices=batch.indices if made.size == batch.size else None)
            costs.add(name, clock() - began)
        return batch


def parts(batch: Batch) -> tuple[Any, ...]:
    """What a function of batches gets: inputs, or inputs and targets, or all three."""
    if batch.weight is not None:
        return batch.inputs, batch.targets, batch.weight
    return (batch.inputs,) if batch.targets is None else (batch.inputs, batch.targets)


def _weight(batch: Batch, padding: int) -> torch.Tensor:
    """The batch's weight, with nothing for the rows that only fill it up."""
    weight = torch.ones(batch.size) if batch.weight is None else batch.weight.clone()
    weight[batch.size - padding :] = 0
    return weight
