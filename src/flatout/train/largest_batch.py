"""`batch_size="auto"`: the largest batch whose step fits in memory.

Trial steps use samples of the first batch, repeated. The number of samples is doubled until a step
does not fit; the limit is then found by bisection. On a CPU each trial runs in a child process
(contained.py) that may use a fraction of the free memory. The system then never kills the job
itself for lack of memory. On a GPU the trials run in this process, whose allocator is limited to
such a fraction, and the changes that the steps make are undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flatout.console import first_line
from flatout.data import Source
from flatout.errors import DataError, FlatoutError, ModelError, OutOfMemory
from flatout.measure import available_bytes, available_on_gpu, finish_device
from flatout.optim import LrRule, as_tuple, is_adaptive, rates_of
from flatout.train.contained import MEMORY, SHARE, TIME, Child
from flatout.train.loop import Loop
from flatout.train.micro_batch import forget_frames, is_out_of_memory
from flatout.train.objective import Objective
from flatout.train.part import Step
from flatout.train.rank_trial import is_trial
from flatout.train.settings import Switch
from flatout.train.snapshot import Snapshot, random_state, set_random_state
from flatout.train.step import Stepper
from flatout.words import counted, duration, rounded, size_words

# Number of batches made ahead, which use memory in addition to the batch of the step.
_AHEAD = 2
# The search ends once the largest batch is known to 1 / _PARTS of its size.
_PARTS = 16
# _LONG_S: maximum expected seconds of a step that is tried. _PATIENCE_S: maximum seconds to wait
# for a trial.
_LONG_S, _PATIENCE_S = 20.0, 60.0
# Maximum seconds to wait for the first trial, which also includes work that is done only once.
_FIRST_PATIENCE_S = 300.0
# Assumed batch size for which the user's learning rate was found: the default of `fit`.
_REFERENCE = 32
# Strategies in which each rank has the whole model; "" is a single rank.
_STRATEGIES = ("", "ddp", "local_sgd")


class TriedStep(NamedTuple):
    """The result of a trial step.

    Attributes:
        samples: number of samples in the batch.
        why: the reason why the step did not fit: `MEMORY`, `TIME`, or an error in one line; "" if
            it fits.
        seconds: seconds of the whole trial.
    """

    samples: int
    why: str
    seconds: float


@dataclass(frozen=True)
class LargestBatch:
    """The batch size that was found.

    Attributes:
        batch_size: samples of a batch, over all ranks.
        ranks: number of ranks among which the batch is split.
        limit: maximum bytes of memory that a rank was allowed to use.
        bound: the reason against a larger batch: "memory", "time", "data", or an error in one line.
            For a resumed run, the name of its checkpoint.
        tried: results of this rank's trials.
    """

    batch_size: int
    ranks: int
    limit: int
    bound: str
    tried: tuple[TriedStep, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "batch_size": self.batch_size,
            "ranks": self.ranks,
            "limit_bytes": self.limit,
            "bound": self.bound,
            "tried": [item._asdict() for item in self.tried],
        }

    def words(self, optimizers: Any, rule: LrRule | None) -> str:
        """Describe the result and its effect on learning in one line."""
        if not self.tried:
            return f"batch {self.batch_size:,}, the batch size saved {self.bound}"
        ours = f" = {self.ranks} x {self.batch_size // self.ranks:,}" if self.ranks > 1 else ""
        took = (
            f"{counted(len(self.tried), 'trial')}, {duration(sum(t.seconds for t in self.tried))}"
        )
        words = f"batch {self.batch_size:,}{ours}: {self._bound()} ({took})"
        return f"{words}; {self._rates(optimizers, rule)}"

    def _bound(self) -> str:
        room = f"{size_words(self.limit)} of memory"
        above = min((t.samples for t in self.tried if t.why == MEMORY), default=0)
        if self.bound == MEMORY:
            beyond = f", {above:,} samples do not fit" if above else ""
            each = " for each rank" if self.ranks > 1 else ""
            return f"the most that fits in {room}{each}{beyond}"
        if self.bound == "data":
            return "all of the data" + (" that ranks share evenly" if self.ranks > 1 else "")
        if self.bound == TIME:
            longest = max(t.seconds for t in self.tried if not t.why)
            return f"a step took {duration(longest)}, and larger batches were not tried"
        return f"a step on more samples fails: {self.bound}"

    def _rates(self, optimizers: Any, rule: LrRule | None) -> str:
        if self.batch_size == _REFERENCE:
            return "the default batch size"
        if rule is not None:
            return "changes what is learned: your learning-rate rule follows it"
        name = "sqrt" if any(map(is_adaptive, as_tuple(optimizers))) else "linear"
        factor = LrRule(name, reference_batch=_REFERENCE).factor(self.batch_size)
        rates = rates_of(optimizers)
        then, now = (", ".join(rounded(r * f, 4) for r in rates) for f in (factor, 1.0))
        return (
            f"changes what is learned: LrRule({name!r}, {_REFERENCE}) would take a learning rate "
            f"of {then}, not applied: it stays {now}"
        )


def check_is_open(objective: Objective, x: Any, y: Any, loop: Loop) -> None:
    """Refuse data and jobs for which no batch can be chosen."""
    if not objective.comes_in_samples(x, y):
        raise DataError(
            f"batch_size='auto' is for data whose batches are made here, and {type(x).__name__} "
            "makes its own",
            do="pass arrays, the dataset of a loader (loader.dataset), or a pipeline without "
            ".batch(...); or leave batch_size out",
        )
    if is_trial():
        raise ModelError(
            "batch_size='auto' would be another batch on each number of ranks, so that "
            "--devices auto cannot compare them",
            do="say --devices N, or a batch size",
        )
    asked = loop.asked.recipe
    if isinstance(asked.memory.micro_batch, int):
        raise ModelError(
            f"batch_size='auto' with memory.micro_batch={asked.memory.micro_batch}: batches are "
            "split until they fit, so the largest is all of the data",
            do="leave one of them out",
        )
    if loop.asked_strategy not in _STRATEGIES:
        raise ModelError(
            f"batch_size='auto' tries steps of each rank alone, and with world.strategy="
            f"{asked.world.strategy} a rank has a part of the model",
            do="say a batch size, or train with world.strategy=ddp",
        )


def largest_batch(objective: Objective, loop: Loop, trying: Loop, source: Source) -> LargestBatch:
    """Return the largest batch whose steps fit; all ranks call it, and agree on one size."""
    if loop.resume_checkpoint is not None:
        kept = loop.resume_checkpoint.state["source"]["batch_size"]
        return LargestBatch(kept, loop.world.size, 0, f"in {loop.resume_checkpoint.name}", ())
    world, samples = loop.world, source.samples
    if samples is None:
        raise DataError(
            "batch_size='auto' needs the number of samples, which these data do not give",
            do="give the dataset a __len__, or say a batch size",
        )
    most = samples // world.size
    if most == 0:
        raise DataError(
            f"{samples} samples for {world.size} ranks", do="train on as many ranks as samples"
        )
    trying.optimizers = as_tuple(objective.optimizer)
    trying.be_ready(objective.model)
    steps = TrialSteps(objective, trying, source)
    tried: list[TriedStep] = []
    failed: FlatoutError | None = None
    try:
        with steps.ready() as attempt:
            tried = search(attempt, most)
        own, bound = _outcome(tried, most, steps.limit, objective)
    except FlatoutError as error:
        own, bound, failed = 0, "", error
    result = world.gather([own, bound], "the largest batch")
    if failed is not None:
        raise failed
    for rank, (size, _) in enumerate(result):
        if size == 0:
            raise OutOfMemory(f"rank {rank} has found no batch that fits: see its own error")
    size, bound = min(result, key=lambda value: int(value[0]))
    return LargestBatch(size * world.size, world.size, steps.limit, bound, tuple(tried))


def search(attempt: Callable[[int], TriedStep], most: int) -> list[TriedStep]:
    """Try steps until the largest batch that fits is known to a sixteenth.

    The first trial has two samples, since some losses and layers do not accept a single sample. If
    it fails for lack of memory, one sample is tried. If it fails for another reason, more samples
    are tried.
    """
    tried, low, high = [attempt(min(2, most))], 0, most + 1
    while True:
        last = tried[-1]
        if not last.why:
            low = last.samples
        elif low or last.why in (MEMORY, TIME):
            high = last.samples
            break
        if last.samples == most or (low and last.seconds > _LONG_S / 2):
            break
        tried.append(attempt(min(2 * last.samples, most)))
    if high == 2 <= most:
        tried.append(attempt(1))
    while low and high <= most and high - low > max(1, low // _PARTS):
        tried.append(attempt((low + high) // 2))
        low, high = (low, tried[-1].samples) if tried[-1].why else (tried[-1].samples, high)
    return tried


def _outcome(
    tried: list[TriedStep], most: int, limit: int, objective: Objective
) -> tuple[int, str]:
    own = max((item.samples for item in tried if not item.why), default=0)
    above = [item for item in tried if item.why and item.samples > own]
    if own:
        if above:
            return own, min(above, key=lambda value: value.samples).why
        return own, "data" if own == most else TIME
    if tried[-1].why == MEMORY:
        weights = sum(p.nbytes for p in objective.adapter.parameters())
        raise OutOfMemory(
            f"batch_size='auto': not even a step on {counted(tried[-1].samples, 'sample')} fits in "
            f"{size_words(limit)} ({SHARE:.0%} of the memory that is free), with "
            f"{size_words(weights)} of weights",
            do="use a smaller model or input, or Memory(activation_checkpointing='on')",
        )
    if tried[-1].why == TIME:
        raise ModelError(
            f"batch_size='auto': a step on {counted(tried[-1].samples, 'sample')} takes longer "
            f"than {duration(tried[-1].seconds)}",
            do="say a batch size",
        )
    raise ModelError(
        f"batch_size='auto': steps fail, on {tried[0].samples:,} to {tried[-1].samples:,} samples: "
        f"{tried[0].why}",
        do="see that a fit with batch_size=32 trains",
    )


class TrialSteps:
    """Makes trial steps to find whether they fit, and undoes their effects.

    Attributes:
        limit: maximum bytes of memory that a step may use.
    """

    def __init__(self, objective: Objective, loop: Loop, source: Source) -> None:
        self._objective, self._loop, self._source = objective, loop, source
        before = random_state()
        self._few = loop.feed.first(source.peek(1)[0]).without_padding()
        set_random_state(before)
        self._seconds = 0.0
        here = loop.world.place.local_world_size
        # The gather ensures that all ranks have measured before any rank takes memory.
        if loop.device.type == "cuda":
            torch.cuda.empty_cache()  # so that cached memory counts as free
            free = available_on_gpu(loop.device)
        else:
            free = available_bytes() // here
        loop.world.gather(free, "how much memory is free")
        self.limit = int(SHARE * free)

    @contextmanager
    def ready(self) -> Iterator[Callable[[int], TriedStep]]:
        """Yield a function that tries a step on a given number of samples."""
        if self._loop.device.type != "cuda":
            yield self._in_child
            return
        device = self._loop.device
        snapshot = Snapshot(self._objective.model, self._loop.optimizers)
        before = torch.cuda.get_per_process_memory_fraction(device)
        total = torch.cuda.mem_get_info(device)[1]
        room = torch.cuda.memory_reserved(device) + self.limit
        torch.cuda.set_per_process_memory_fraction(min(before, room / total), device)
        try:
            yield lambda size: self._here(size, snapshot)
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)
            self._objective.end()

    def _in_child(self, size: int) -> TriedStep:
        began = time.monotonic()
        patience = _PATIENCE_S if self._seconds else _FIRST_PATIENCE_S
        answer = Child(lambda: self._step(size), self.limit).result(patience)
        seconds = time.monotonic() - began
        self._seconds = self._seconds or seconds
        return TriedStep(size, answer.why, round(seconds, 4))

    def _here(self, size: int, snapshot: Snapshot) -> TriedStep:
        began, why = time.monotonic(), ""
        try:
            self._step(size)
        except Exception as error:
            why = MEMORY if is_out_of_memory(error) else first_line(error)
            forget_frames(error)
        seconds = time.monotonic() - began
        snapshot.restore()
        torch.cuda.empty_cache()
        return TriedStep(size, why, round(seconds, 4))

    def _step(self, size: int) -> None:
        objective, loop = self._objective, self._loop
        objective.model.train()
        stepper = Stepper(
            Switch(objective.model, loop.optimizers, loop.device),
            clip_norm=loop.asked.clip[0],
            clip_value=loop.asked.clip[1],
        )
        stepper.may_split = False
        asked = loop.asked.recipe
        wanted = {
            "precision": asked.compute.precision,
            "activation_checkpointing": asked.memory.activation_checkpointing,
        }
        named = {name: value for name, value in wanted.items() if value != "auto"}
        stepper.use(stepper.switch.now.but(**named))
        try:
            batch = self._few.repeated(size)
            ahead = max(_AHEAD, loop.asked.accumulate)
            beside: list[Any] = [self._few.repeated(size) for _ in range(ahead)]
            if loop.world.size > 1:  # gradients are gathered before they are added up
                beside += [torch.empty_like(p) for p in stepper.update.parameters]
            compute = objective.job(loop, self._source, training=True).compute
            stepper(Step(1, (batch,), compute, stepper.joint))
            finish_device()
            del beside
        finally:
            stepper.switch.release()
