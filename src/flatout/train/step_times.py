"""Step times by batch size, and with several ranks on this host: `flatout run --profile-batches`.

They are measured after a fit, on steps of this rank alone without communication. The steps use
samples of the first batch, at the job's local batch size, a half, a quarter and an eighth of it, in
turn and back. On a CPU the steps run in child processes (contained.py) that return only times;
several simultaneous ranks are measured in the same way. On a GPU the steps run in this process, and
their effects are undone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch

from flatout.data import NO_ROWS, Batch, Source
from flatout.devices import affinity, set_affinity
from flatout.measure import RanksOnHost, StepTimes, available_bytes, finish_device, usable_cpus
from flatout.strategies import Strategy
from flatout.train.contained import SHARE, Child
from flatout.train.graphs.graphs import Graphs
from flatout.train.loop import Loop
from flatout.train.losses.loss_value import Compute
from flatout.train.part import Step
from flatout.train.snapshot import Snapshot, random_state, set_random_state
from flatout.train.step import Stepper
from flatout.world import ONE, own_cpus

ASKED = "FLATOUT_PROFILE_BATCHES"
"""Environment variable that requests the measurement."""

_PARTS = (1, 2, 4, 8)
# Minimum number of steps that are timed each time a batch size is measured.
_FEWEST = 2
_WARM, _VISITS = 2, 4
# _LONG_S: seconds after which no further measurement begins. _PATIENCE_S: seconds to wait for the
# result of a child process.
_LONG_S, _PATIENCE_S = 20.0, 300.0
# Seconds that simultaneous ranks wait for one another before they start together.
_STARTS_S = 0.3
_MOST_SECONDS = 200


def is_asked() -> bool:
    """Return whether step times are to be measured."""
    return bool(os.environ.get(ASKED))


def step_times(loop: Loop, compute: Compute, source: Source) -> tuple[Any, Any, list[str]]:
    """Measure after training; all ranks call it, and measure at the same time."""
    if why := why_not(loop):
        return [], [], [f"step times by batch are not measured: {why}"]
    before = random_state()
    few = next(iter(source.peek(1)), None)
    set_random_state(before)
    if few is None or source.batch_size is None:
        return [], [], ["step times by batch are not measured: batches have no size"]
    if few.is_jagged:
        why = NO_ROWS
        return [], [], [f"step times by batch are not measured: {why}"]
    steps = _Steps(loop, compute, loop.ready(few).without_padding())
    local = max(1, round(source.batch_size / loop.world.size))
    sizes = list(dict.fromkeys(max(1, local // part) for part in _PARTS))
    loop.say(
        f"measuring steps on {', '.join(map(str, sizes))} samples: weights and random "
        "numbers are not changed"
    )
    result, why = steps.by_size(sizes)
    times = [StepTimes(size, seconds) for size, seconds in zip(sizes, result, strict=True)]
    words = [f"step times by batch are not measured: {why}"] if why else []
    beside: list[RanksOnHost] = []
    if loop.world.size == 1 and loop.device.type == "cpu" and not why:
        beside, why = steps.beside(local, median(times[0].seconds))
        words += [f"several ranks on this host are not measured: {why}"] if why else []
    loop.world.wait("times of steps")
    return times, beside, words


def why_not(loop: Loop) -> str:
    """Return the reason why steps cannot be measured after a fit; "" without one."""
    if loop.lays_out or loop.has_servers or loop.stepper.switch.shards is not None:
        return "each rank has only a part of the model"
    kept = None if loop.feed.features is None else loop.feed.features.facts
    if kept is not None and kept["where"]:
        return (
            "features of frozen layers are kept, so that steps take other times than without them"
        )
    return ""


class _Steps:
    """Makes steps of this rank alone."""

    def __init__(self, loop: Loop, compute: Compute, few: Batch) -> None:
        self._loop, self._compute, self._few = loop, compute, few

    def by_size(self, sizes: list[int]) -> tuple[list[list[float]], str]:
        if self._loop.device.type != "cuda":
            result = Child(lambda: self._visits(sizes), self._room(1)).result(_PATIENCE_S)
            return result.value or [], result.why
        stepper = self._loop.stepper
        switch = stepper.switch
        snapshot = Snapshot(switch.model, switch.optimizers, self._compute)
        with self._loop.trainer.uncounted():
            try:
                return self._visits(sizes), ""
            finally:
                snapshot.restore()

    def beside(self, size: int, seconds: float) -> tuple[list[RanksOnHost], str]:
        most = usable_cpus()
        counts = [2**n for n in range(most.bit_length()) if 2**n <= most]
        cpus = sorted(affinity())
        ranks_on_hosts: list[RanksOnHost] = []
        for ranks in counts:
            # All children have warmed up by then.
            begin = time.monotonic() + _STARTS_S + (_WARM + 2) * ranks * seconds
            room = self._room(ranks)
            children = [
                Child(self._on(own_cpus(cpus, rank, ranks), begin, size), room)
                for rank in range(ranks)
            ]
            result = [child.result(_PATIENCE_S) for child in children]
            if why := next((item.why for item in result if item.why), ""):
                return ranks_on_hosts, why
            all_ranks = [second for item in result for second in item.value]
            ranks_on_hosts.append(RanksOnHost(ranks, size, _thinned(all_ranks)))
        return ranks_on_hosts, ""

    def _room(self, ranks: int) -> int:
        here = self._loop.world.place.local_world_size
        return int(SHARE * available_bytes() / max(here, ranks))

    def _on(self, cpus: list[int], begin: float, size: int) -> Callable[[], list[float]]:
        def run() -> list[float]:
            set_affinity(cpus)
            torch.set_num_threads(len(cpus))
            with _steps_alone(self._loop.stepper) as stepper:
                batch = self._few.repeated(size)
                for _ in range(_WARM):
                    self._step(stepper, batch)
                first = self._step(stepper, batch)
                end = begin + max(self._loop.terms.ranks_s, 5 * first)
                result: list[float] = []
                while time.monotonic() < end or not result:
                    counts = time.monotonic() >= begin
                    seconds = self._step(stepper, batch)
                    result += [seconds] if counts else []
                return result

        return run

    def _visits(self, sizes: list[int]) -> list[list[float]]:
        result: list[list[float]] = [[] for _ in sizes]
        with _steps_alone(self._loop.stepper) as stepper:
            batches = [self._few.repeated(size) for size in sizes]
            for batch in batches:
                for _ in range(_WARM):
                    self._step(stepper, batch)
            began = time.monotonic()
            for visit in range(_VISITS):
                places = list(range(len(sizes)))
                for place in places if visit % 2 == 0 else reversed(places):
                    if result[place] and time.monotonic() > began + _LONG_S:
                        continue
                    result[place] += self._visit(stepper, batches[place])
        return [_thinned(seconds) for seconds in result]

    def _visit(self, stepper: Stepper, batch: Batch) -> list[float]:
        self._step(stepper, batch)  # the caches held data of another size
        result: list[float] = []
        while len(result) < _FEWEST or sum(result) < self._loop.terms.visit_s:
            result.append(self._step(stepper, batch))
        return result

    def _step(self, stepper: Stepper, batch: Batch) -> float:
        began = time.perf_counter()
        step = Step(self._loop.next_step, (batch,), self._compute, stepper.joint)
        stepper.chain.inside(Graphs)(step)
        finish_device()
        return time.perf_counter() - began


@contextmanager
def _steps_alone(stepper: Stepper) -> Iterator[Stepper]:
    names = (
        "world",
        "samples",
        "strategy",
        "_norms",
        "_moves",
        "may_split",
    )
    kept = {name: getattr(stepper, name) for name in names}
    across = stepper.joint.update.across
    stepper.world, stepper.strategy = ONE, Strategy()
    stepper.samples = 0.0
    stepper._norms = stepper._moves = None
    stepper.may_split, stepper.joint.update.across = False, None
    try:
        yield stepper
    finally:
        stepper.joint.update.across = across
        for name, value in kept.items():
            setattr(stepper, name, value)


def _thinned(seconds: list[float]) -> list[float]:
    if len(seconds) > _MOST_SECONDS:
        places = np.linspace(0, len(seconds) - 1, _MOST_SECONDS).round().astype(int)
        seconds = [seconds[place] for place in places]
    return [float(f"{item:.5g}") for item in seconds]
