"""Time-lapse: end loaders and loops early, to observe what follows an epoch.

A short observation of a script with long epochs sees no validation, checkpoint, scheduler or second
epoch. Where no output of a run is kept, each loader gives a few more batches and then its last one,
which may be smaller. Stepping loops of the user end in the same way. `len(loader)` is unchanged,
and so are numbers that scripts compute from this length. These epochs show the actions of the
script, but nothing about their duration. `with_lapse` adds the findings to an earlier Observation.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from threading import get_ident
from time import monotonic
from typing import Any

from flatout.hooks import Hook, wrap
from flatout.observe.lanes import INPUT
from flatout.observe.loops import EVALUATING, STEPPING, Loops
from flatout.observe.observation import (
    Lapse,
    Loader,
    Model,
    Observation,
    Schedule,
    Site,
)
from flatout.observe.rewriting import Rewriting
from flatout.observe.sites import read
from flatout.observe.taken_out import batches_in
from flatout.observe.watch import Watch

# _EPOCHS: epochs after which the time-lapse is complete; _STEPS: minimum number of steps of each of
# these epochs.
_EPOCHS, _STEPS = 2, 2
# Maximum seconds to find the last batch of an epoch, since a sampler yields all other batches
# before the last.
_SEEKING_S = 1.0
# Seconds in which the script must end after the interrupt.
_GRACE_S = 3.0
_DATALOADER = "torch.utils.data.dataloader"


class TimeLapse:
    """Control that ends the loaders and loops of a running script early."""

    def __init__(self, watch: Watch, loops: Loops, code: Rewriting, seconds: float) -> None:
        self._watch, self._lanes = watch, watch.lanes
        self._loops, self._code = loops, code
        self._seconds = seconds
        self._hook: Hook | None = None
        self._timer: threading.Timer | None = None
        self._is_over = False
        self._cut: dict[int, tuple[int, int | None]] = {}  # lengths, by loader index
        self._began_s = 0.0
        self._began_at = 0
        self._begun: dict[int, int] = {}  # epochs of each loader before the time-lapse
        self._saved = 0
        self._schedules: dict[int, int] = {}

    def why_not(self) -> str | None:
        """Return the reason against a time-lapse.

        "" where the observation already had a whole epoch; None where a time-lapse should run.
        """
        has_more = any(item.facts.epochs > 1 for item in self._trained())
        if self._loops.had_epoch or (has_more and not self._loops.is_counting):
            return ""
        can_end = self._trained() or self._loops.is_stepping
        return None if can_end else "its steps are taken in no loop that can end early"

    def _trained(self) -> list[Any]:
        return [loader for loader in self._watch.loaders if loader.in_training]

    def begin(self) -> None:
        """Begin the time-lapse; to be called at the end of a step."""
        self._began_s, self._began_at = monotonic(), self._lanes.steps
        self._begun = {loader.number: loader.facts.epochs for loader in self._watch.loaders}
        self._saved = len(self._watch.saved)
        self._loops.epochs = 0
        self._loops.ends_early, self._loops.ends_unsized = True, not self._trained()
        module = sys.modules.get(_DATALOADER)
        if module is not None:
            owner = module._BaseDataLoaderIter
            self._hook = wrap(owner, "__next__", "ablation", self._given)
        self._watch.at(self._lanes.steps + 1, self._look)
        self._timer = threading.Timer(self._seconds, self._interrupt, [os.getpid()])
        self._timer.daemon = True
        self._timer.start()

    @property
    def has_begun(self) -> bool:
        """True once the time-lapse has begun."""
        return bool(self._began_s)

    def _interrupt(self, process: int) -> None:
        if os.getpid() == process:
            self._is_over = True
            self._watch.enough()
            os.kill(process, signal.SIGINT)
            again = threading.Timer(_GRACE_S, self._watch.on_enough_again)
            again.daemon = True
            again.start()

    def _look(self) -> None:
        if self._epochs() >= _EPOCHS or monotonic() - self._began_s > self._seconds:
            self._watch.enough()
        else:
            self._watch.at(self._lanes.steps + 1, self._look)

    def _epochs(self) -> int:
        begun = [item.facts.epochs - self._begun.get(item.number, 1) for item in self._trained()]
        return self._loops.epochs if self._loops.has_cut or not begun else min(begun)

    # -- loaders ----------------------------------------------------------------------------------

    def _given(self, original: Any) -> Any:
        lanes = self._lanes

        def take(iterator: Any) -> Any:
            loader_now = iterator.__dict__.get("_flatout_seen")
            if loader_now is not None and get_ident() == lanes.thread and lanes.current != INPUT:
                self._count(iterator, loader_now)
            return original(iterator)

        return take

    def _count(self, iterator: Any, seen: Any) -> None:
        lanes, kept = self._lanes, iterator.__dict__
        taken = kept["_flatout_taken"] = kept.get("_flatout_taken", -1) + 1
        first = kept.setdefault("_flatout_first", lanes.steps)
        trains = seen.in_training
        enough = STEPPING if trains else EVALUATING
        if taken < enough or (trains and lanes.steps - first < _STEPS):
            return
        if kept.setdefault("_flatout_is_cut", False):
            return
        kept["_flatout_is_cut"] = True
        number = iterator._num_yielded
        length = batches_in(iterator)
        if length is not None and number >= length - 1:
            return  # the epoch ends by itself
        self._cut.setdefault(seen.number, (number + (length is not None), length))
        if iterator._dataset_kind == 0:  # a map-style dataset
            iterator._sampler_iter = _last_of(iterator._sampler_iter)
        else:
            raise StopIteration

    # -- findings ---------------------------------------------------------------------------------

    def end(self) -> None:
        """End the time-lapse: nothing ends early any more."""
        self._loops.ends_early = False
        if self._timer is not None:
            self._timer.cancel()
        if self._hook is not None:
            self._hook.remove()

    def result(self, before: Observation, later: Observation) -> Lapse:
        """Return the findings, from the Observation before the time-lapse and one after it."""
        parts = []
        if later.evaluation_site is not None:
            parts.append("validation")
        if len(self._watch.saved) > self._saved or before.saved:
            parts.append("checkpoint")
        known = sum(schedule.steps for schedule in before.schedules)
        if known or sum(later_schedule.steps for later_schedule in later.schedules) > known:
            parts.append("schedule")
        return Lapse(
            seconds=monotonic() - self._began_s,
            steps=self._lanes.steps - self._began_at,
            epochs=self._epochs() + self._ended_last(),
            parts=parts,
            cut=[*self._where_cut()],
            steps_schedules=self._code.steps_schedules,
        )

    def _ended_last(self) -> bool:
        of_loader = bool(self._trained()) and not self._loops.has_cut
        return of_loader and not (self._is_over or self._watch.is_enough)

    def _where_cut(self) -> Iterator[tuple[str, int, int | None]]:
        for loader in self._watch.loaders:
            if loader.number in self._cut:
                site = loader.facts.site
                place = loader.facts.dataset if site is None else str(read(site))
                yield (place, *self._cut[loader.number])
        for number, (turns, length) in self._loops.cut.items():
            yield (str(read(Site(*self._code.loops[number]))), turns, length)


def _last_of(indices: Iterator[Any]) -> Iterator[Any]:
    until = monotonic() + _SEEKING_S
    last: list[Any] = []
    for index in indices:
        last = [index]
        if monotonic() > until:
            return
    yield from last


def with_lapse(observation: Observation, later: Observation, lapse: Lapse) -> Observation:
    """Return an Observation with the findings of a time-lapse added.

    Times and counts stay those of the earlier Observation, since shortened epochs distort them. The
    findings describe actions of the script: how it calls models, which samples begin an epoch,
    whether it steps schedulers, and which files it saves.
    """
    result = replace(observation, lapse=lapse)
    result.evaluation_site = observation.evaluation_site or later.evaluation_site
    result.saved = observation.saved or later.saved
    result.loaders = [_loader(loader, later) for loader in observation.loaders]
    known = {_key(loader) for loader in observation.loaders}
    result.loaders += [_new(loader) for loader in later.loaders if _key(loader) not in known]
    result.models = [_model(model, later) for model in observation.models]
    result.monitors = later.monitors
    result.schedules = [*map(partial(_schedule, observation), later.schedules)]
    calls = {str(call.site) for call in observation.calls}
    result.calls = observation.calls + [
        call for call in later.calls if call.kind == "set_epoch" and str(call.site) not in calls
    ]
    return result


def _key(loader: Loader) -> tuple[Any, ...]:
    return str(loader.site), loader.kind, loader.dataset, loader.length, loader.batch_size


def _loader(loader: Loader, later: Observation) -> Loader:
    same = next((other for other in later.loaders if _key(other) == _key(loader)), None)
    if same is None:
        return loader
    return replace(
        loader,
        hashes=same.hashes,
        shared_rows=same.shared_rows,
        unseen_classes=same.unseen_classes,
    )


def _new(loader: Loader) -> Loader:
    return replace(deepcopy(loader), first_ms=[], wait_ms=None, lanes_ms={}, hot=[])


def _model(model: Model, later: Observation) -> Model:
    for other in later.models:
        if (other.kind, str(other.site)) == (model.kind, str(model.site)):
            return replace(
                model,
                evaluated_in_train_mode=other.evaluated_in_train_mode,
                evaluated_with_grad=other.evaluated_with_grad,
                trained_in_eval_mode=other.trained_in_eval_mode,
            )
    return model


def _schedule(observation: Observation, schedule: Schedule) -> Schedule:
    key = (schedule.kind, str(schedule.site))
    before = sum(
        schedule.steps
        for schedule in observation.schedules
        if (schedule.kind, str(schedule.site)) == key
    )
    return replace(schedule, in_lapse=schedule.steps - before, steps=before)
