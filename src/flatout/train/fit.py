"""Fit: epochs of steps, with validation, callbacks and checkpoints around them.

prepare                     settings decided by measuring; resume
for epoch in epochs:
    for batch in source:
        one step            step.py; scheduler; callbacks with every=n; checkpoint every n
    validation              evaluate.py
    callbacks, checkpoint
"""

from __future__ import annotations

import copy
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import psutil
import torch

from flatout.console import first_line
from flatout.data import (
    Batch,
    Pipeline,
    Source,
    WaitStopped,
    refuse_dead_worker,
    waits_end_when,
)
from flatout.errors import CheckpointError, ModelError, NumbersError
from flatout.train import guard
from flatout.train.callbacks import (
    Callback,
    Figures,
    JsonLines,
    Progress,
    remaining,
    train_job_status,
)
from flatout.train.callbacks.monitor import Monitor, check_mode
from flatout.train.callbacks.state_guard import CallbackGuard
from flatout.train.captured_steps import captured_steps
from flatout.train.counted import counted, counting, operator_count
from flatout.train.evaluate import look_at_validation, train_mode
from flatout.train.freezing_checks import freezing_lines
from flatout.train.graphs.graphs import graphs_of
from flatout.train.history import History
from flatout.train.job_facts import UNREAD, Facts, callback_facts, fact
from flatout.train.layout_words import layout_words
from flatout.train.losses.confusion import table
from flatout.train.objective import Objective, validates
from flatout.train.rank_trial import is_trial
from flatout.train.ranks import agreed, part_of
from flatout.train.run_files import RunFiles
from flatout.train.sections import end_section, open_section
from flatout.train.signals import Interrupted, StopSignals, is_interactive
from flatout.train.signature import facts_of
from flatout.train.snapshot import random_state, set_random_state
from flatout.train.staleness import late_words, staleness_facts, staleness_words
from flatout.train.state import FitState, FittingTrainer
from flatout.train.step_times import is_asked, step_times
from flatout.train.stragglers import Pace, RankTimes
from flatout.train.waiting import waiting_words
from flatout.world import LostRank, are_back

# Minimum seconds between two comparisons of the ranks' weights, which are made at the end of an
# epoch.
_COMPARE_EVERY_S = 10.0
# Flatout's own callbacks for display and logs, which have no state in a checkpoint.
_SHOWS = (Progress, JsonLines, remaining.Remaining, train_job_status.TrainJobStatus)


class Fit:
    """One call of `Trainer.fit`."""

    def __init__(
        self,
        trainer: FittingTrainer,
        objective: Objective,
        source: Source,
        validation: Source | None,
        epochs: int,
        callbacks: list[Callback],
        progress: bool | Progress | None,
        initial_epoch: int = 0,
        validation_freq: int | Collection[int] = 1,
        max_steps: int | None = None,
    ) -> None:
        if max_steps is not None and not (isinstance(max_steps, int) and max_steps > 0):
            raise ModelError(f"max_steps must be a whole number from 1 on, found {max_steps!r}")
        self._max_steps = max_steps
        self._initial_epoch = initial_epoch
        self._validation_freq = validation_freq
        self.trainer = trainer
        self.objective = objective
        self.loop = trainer.loop
        self.source = source = agreed(source, self.loop.world)
        self.validation = None if validation is None else agreed(validation, self.loop.world)
        self.job = self.objective.job(self.loop, source, training=True)
        self.compute = self.job.compute
        steps = None if source.steps is None else -(-source.steps // self.loop.asked.accumulate)
        batch_size = (source.batch_size or 1) * self.loop.asked.accumulate
        history = self.objective.history(batch_size=batch_size, timeline=self.loop.timeline)
        self.state = FitState(trainer, history, epochs, steps, batch_size)
        self.loop.progress.planned_epochs = epochs
        shows = progress is not False and self.loop.world.is_first
        bar = progress if isinstance(progress, Progress) else Progress()
        self.callbacks = [*callbacks, bar] if shows else callbacks
        if self.loop.world.is_first:
            reporters = [*remaining.asked_for(), *train_job_status.asked_for()]
            self.callbacks = [*self.callbacks, *reporters]
        self.loop.trainer.shows_notes = any(
            isinstance(callback, Progress) for callback in self.callbacks
        )
        self.files = RunFiles(self.loop)
        self.signals = StopSignals()
        self._asked: list[float | None] = []
        # Reason of this rank's own callback to stop, until the other ranks know it.
        self._own_reason: str | None = None
        self._path: str | None = None
        self._plateau: Monitor | None = None
        self._skipped_before = 0  # steps that overflowed before a resume
        self._guard = CallbackGuard(objective.model, self._note)
        self._running = False
        self._compare_at = 0.0
        self._reported: set[str] = set()  # figures whose NaN or infinity was reported
        # `may_take_back`: whether killed ranks may rejoin. `takes_back`: whether killed ranks
        # rejoin now; then all ranks begin again from the checkpoint that was written for this.
        self.may_take_back = self.takes_back = False
        self._look_for_them_at = 0.0

    def run(self) -> History:
        """Train, and leave the model, optimizer and process as a script expects them."""
        try:
            self._run()
        except (LostRank, WaitStopped):
            # Raise a recorded signal again: it comes from the launcher, and ends this rank.
            self.signals.pass_on()
            raise
        except RuntimeError as error:
            refuse_dead_worker(error)
            raise
        self.signals.pass_on()
        return self.state.history

    def _run(self) -> None:
        self._running = True
        with self.signals, waits_end_when(lambda: self.signals.received is not None):
            try:
                self._prepare()
                self._train()
            except BaseException as error:
                # Raise the first error; a failed save has been logged.
                with suppress(CheckpointError):
                    self.loop.close(error)
                raise
            finally:
                self._running = self.loop.trainer.shows_notes = False
            self.loop.close()

    def save_checkpoint(self, score: float | None) -> str:
        """Write a checkpoint and return its path; while a fit runs, after all callbacks have run.

        So it holds the state that all callbacks have after this step or epoch. In a trial of ranks
        nothing is written, and the path is empty.
        """
        if is_trial():
            return ""
        path = self.loop.next_checkpoint()
        self._asked.append(score)
        if not self._running:
            self._checkpoint()
            self.loop.checkpointing.wait()
        return path

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs in addition to the Loop's own."""
        stateful = self._stateful()
        return {
            "history": self.state.history.epochs,
            "notes": self.state.history.notes,
            "skipped_steps": self._skipped_before + self.loop.skipped_steps,
            "logs": self.state.logs,
            "callbacks": [c.state_dict() for c in stateful],
            "fits_before": self.objective.fits_before,
        }

    # -- before ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        state, loop, objective = self.state, self.loop, self.objective
        train_mode(objective.model)
        for callback in self.callbacks:
            callback.prepare(state)
        for line in freezing_lines(objective.model, [objective.optimizer]):
            loop.say(line)
        planned = None
        if state.steps_per_epoch is not None:
            planned = state.steps_per_epoch * max(0, state.epochs - self._initial_epoch)
        if self._max_steps is not None:
            planned = min(planned or self._max_steps, self._max_steps)
        loop.identity.trainer = self._facts()
        loop.prepare(
            objective.model,
            objective.optimizer,
            objective.scheduler,
            compute=self.compute,
            data=self.source,
            steps=planned,
        )
        if loop.trainer.largest_batch is not None and loop.resume is None:
            loop.stepper.notes.append(loop.trainer.largest_batch["words"])
        self.job.reset()  # measuring has fed its metrics
        loop.trainer.uncounted = self._uncounted
        figures = self._figures()
        if loop.world.size > 1:
            tell = loop.note if loop.stepper.strategy.layout else loop.say
            own = loop.first_batches.are_own
            tell(layout_words(loop, loop.first_batches.size if own else self.source.batch_size))
        if isinstance(self.source, Pipeline):
            for note in (*self.trainer.input_lines, *self._input_notes(self.source)):
                loop.say(f"input: {note}")
        if self.validation is not None:
            loop.tell_skipped(self.validation)
        state.history.recipe = loop.resolved
        state.history.classes = list(self.trainer.classes or ())
        is_told = self.source.batch_size is not None and not loop.first_batches.are_own
        if not is_told and loop.first_batches.size is not None:
            # Batches come ready-made, so the first one shows their size.
            state.batch_size = loop.first_batches.size * loop.asked.accumulate
            state.history.batch_size = state.batch_size
        if loop.restored_extra is None:
            loop.progress.epoch = self._initial_epoch
        state.epoch, state.step = loop.epoch, loop.step_count
        state.step_in_epoch = loop.progress.step_in_epoch
        if loop.resume is not None and loop.restored_extra is not None:
            self._load_state_dict(loop.restored_extra)
            self.job.load_state_dict(self._own_metrics(loop.resume.own))
        state.history.lr_scale = loop.stepper.lr_scale
        self._plateau = self._plateau_figure(figures)
        for callback in self.callbacks:
            callback.check(state, figures)
        part = part_of(self.source, loop.world, loop.note, whole=loop.takes_whole_batches)
        self._can_claim = getattr(part, "can_claim", False)
        if loop.feed.features is not None:
            loop.feed.features.begin(self.source, part, loop.epoch)
        self.callbacks.extend(self.files.begin())
        place = loop.world.place
        state.history.world_size, state.history.nodes = place.world_size, place.nodes
        state.history.startup_s = time.time() - psutil.Process().create_time()
        loop.timeline.reset()
        loop.timeline.start()
        alike, waits = not loop.takes_whole_batches, not loop.stepper.strategy.steps_apart
        pace = loop.stepper.chain.find(Pace) or Pace(loop.world.collectives)
        self._times = RankTimes(loop.world, loop.timeline, pace, alike=alike, waits=waits)
        self._count, self._job_changes = operator_count(loop), loop.progress.job_changes

    def _input_notes(self, source: Pipeline) -> list[str]:
        world, of_ranks = self.loop.world, None
        if source.has_own_rows:
            of_ranks = world.gather(source.notes(), "what ranks say of their data")
        self.loop.feed.skipped(source, world)  # marks rows as reported that the notes name
        if of_ranks is None:
            return source.notes()
        return list(dict.fromkeys(note for notes in of_ranks for note in notes))

    def _figures(self) -> Figures:
        known = list(self.job.results())
        names, complete = ["loss", *known], True
        if self.validation is not None:
            most = max(1, self.loop.first_batches.size or self.state.batch_size)
            figures = look_at_validation(self.objective, self.loop, self.validation, most)
            self.job.reset()  # a Keras model has the same metrics for both
            names += [f"val_{name}" for name in ("loss", *(figures or ()))]
            complete = figures is not None
        adds = any(callback.adds_figures for callback in self.callbacks)
        # With several losses, the metrics include the total too.
        return Figures(tuple(dict.fromkeys([*names, "seconds"])), complete and not adds)

    def _load_state_dict(self, saved: Any) -> None:
        state, callbacks = self.state, self._stateful()
        state.history.epochs.extend(saved["history"])
        state.history.notes.extend(saved["notes"])
        self._skipped_before = saved.get("skipped_steps", 0)
        state.logs = saved["logs"]
        for callback, its in zip(callbacks, saved["callbacks"], strict=True):
            callback.load_state_dict(its)

    def _own_metrics(self, saved: list[Any]) -> list[Any]:
        world = self.loop.world
        if len(saved) == world.size:
            return list(saved[world.rank]["metrics"])
        return [state for item in saved for state in item["metrics"]][world.rank :: world.size]

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        counted = copy.deepcopy(self.job.state_dict())
        try:
            yield
        finally:
            self.job.reset()
            self.job.load_state_dict(counted)

    def _facts(self) -> Facts:
        validation = self.validation
        return {
            **self.objective.facts(),
            **facts_of(self.trainer.signature),
            **callback_facts(self._stateful()),
            "epochs": fact(self.state.epochs),
            "validation data": fact("none")
            if validation is None
            else fact(validation.describe(), self._digest_of(validation)),
        }

    def _digest_of(self, source: Source) -> str:
        return UNREAD if self.loop.run is None else source.digest

    def _stateful(self) -> list[Callback]:
        return [c for c in self.callbacks if not isinstance(c, _SHOWS)]

    # -- epochs ------------------------------------------------------------------------------

    def _train(self) -> None:
        loop, state = self.loop, self.state
        try:
            self._call("on_fit_start")
            # After `on_fit_start`, so that Progress shows these notes as new ones.
            state.history.notes.extend(loop.notes())
            self._epochs()
            if self.takes_back:
                loop.checkpointing.wait()
                return
            loop.meet_others()
            self._note_steps_missing()
            for line in loop.feed.skipped(self.source, loop.world):  # of an unfinished epoch
                self._note(line)
            state.history.stop_reason = state.stop_reason
            self._note_staleness()
            self._note_settings()
            self._measure_steps()
            state.history.lanes_by_rank = loop.world.gather(loop.timeline.lanes())
            loop.monitor.meet()
            if loop.run is not None:
                if not loop.is_saved:
                    self._checkpoint()
                loop.checkpointing.wait()
            self._note_waiting()
            if state.history.confusion is not None:
                loop.say(table(state.history.confusion, state.history.classes))
            self.files.end(state.history)
            self._call("on_fit_end")
            if self._asked:
                self._checkpoint()
        except BaseException as error:
            for callback in self.callbacks:
                callback.on_fit_error(state, error)
            raise

    def _note_steps_missing(self) -> None:
        state, most = self.state, self._max_steps
        if most is not None and state.step < most and not state.stop_reason:
            self._note(
                f"epochs={state.epochs} ended training after {state.step:,} steps, before "
                f"max_steps={most:,}: pass a larger epochs to train on"
            )

    def _note_settings(self) -> None:
        loop = self.loop
        loop.end_tuning()
        assert loop.resolved is not None
        self.state.history.tuning = loop.tuning
        self.state.history.evaluation = loop.evaluated
        if loop.feed.features is not None:
            self.state.history.features = loop.feed.features.facts
        loop.resolved = loop.feed.with_workers(loop.asked.recipe, loop.resolved)
        self.state.history.recipe = loop.resolved
        self.files.write_recipe()

    def _measure_steps(self) -> None:
        if self.loop.run is None or not is_asked():
            return
        times, beside, words = step_times(self.loop, self.compute, self.source)
        self.loop.monitor.keep_step_times(times, beside)
        for line in words:
            self._note(line)

    def _note_waiting(self) -> None:
        steps, lanes = self.loop.timeline.steps, self.loop.timeline.lanes()
        note = waiting_words(self.source, lanes, steps, self.state.epochs)
        if note is not None:
            self._note(note)

    def _note_staleness(self) -> None:
        by_rank = self.loop.stepper.strategy.staleness()
        if by_rank is not None:
            self.state.history.staleness = facts = staleness_facts(by_rank)
            self._note(staleness_words(facts, self.loop.learning_rate))
        late = self.loop.stepper.strategy.late()
        if late is not None:
            self.state.history.late = late
            self._note(late_words(late))

    def _note(self, words: str) -> None:
        self.state.history.notes.append(words)
        self.loop.monitor.keep_notes([words])
        if not self.loop.trainer.shows_notes:
            self.loop.say(words)

    def _epochs(self) -> None:
        state, loop = self.state, self.loop
        loop.world.count_points()
        while not self._is_over():
            state.epoch = loop.epoch
            began = time.perf_counter()
            self._call("on_epoch_start")
            if self._asked:
                self._checkpoint()
            self._steps()
            if self.takes_back:
                return
            is_part = state.step_in_epoch != state.steps_per_epoch
            is_made = self._max_steps is not None and state.step >= self._max_steps
            ends = is_made or self.objective.ends_epochs
            if state.stop_reason is not None and is_part and not ends:
                break  # within an epoch: its figures would cover a part only
            self._end_epoch(began)

    def _is_over(self) -> bool:
        state, own = self.state, self.state.stop_reason or self._own_reason
        reasons = self.loop.world.gather(own, "whether a rank wants to stop")
        state.stop_reason = next((reason for reason in reasons if reason is not None), None)
        return state.stop_reason is not None or self.loop.epoch >= state.epochs

    def _steps(self) -> None:
        """Train on the rest of the epoch, in sections if the ranks claim parts of it."""
        loop = self.loop
        self._watching = [c for c in self.callbacks if type(c).on_step is not Callback.on_step]
        self._schedule = self._per_step_scheduler()
        self._save_every = loop.asked.recipe.save.every if loop.run is not None else None
        while self._can_claim and open_section(loop, self.source, self._save_every):
            self._section()
            if self._end_section():
                return
        self._section()

    def _section(self) -> None:
        """Train on this rank's batches of the epoch, or of a section of it."""
        state, loop = self.state, self.loop
        claims, asks = loop.feed.claims is not None, False

        def quiet() -> int:
            if self._schedule is not None:
                return 1
            everies = [callback.every for callback in self._watching]
            if self._save_every:
                everies.append(self._save_every)
            due = [every - state.step % every for every in everies]
            if self._max_steps is not None:
                due.append(max(1, self._max_steps - state.step))
            return min(due, default=sys.maxsize)

        for _ in self._optimizer_steps(quiet):
            self._count_steps()
            if claims:
                # Ranks can only act together, at the end of the section.
                wants = self._asked or state.stop_reason or self.signals.received is not None
                if (wants or self._are_others_back()) and not asks:
                    loop.stepper.strategy.close_section()
                    asks = True
                continue
            if self._asked or (self._save_every and not state.step % self._save_every):
                self._checkpoint()
            if self._others_go_on():
                self._own_reason, state.stop_reason = state.stop_reason, None
            if (signum := self._asked_to_stop()) is not None:
                self._interrupt(signum)
            if state.stop_reason is not None:
                return

    def _count_steps(self) -> None:
        state, before = self.state, self.state.step
        state.step, state.step_in_epoch = self.loop.step_count, self.loop.progress.step_in_epoch
        if self._schedule is not None:
            for _ in range(state.step - before):
                self._schedule.step()
        for callback in self._watching:
            if state.step // callback.every > before // callback.every:
                self._guard(callback, "on_step", state)
        if self._max_steps is not None and state.step >= self._max_steps:
            state.stop(f"{self._max_steps:,} steps were made, the max_steps of this fit")

    def _end_section(self) -> bool:
        state, loop = self.state, self.loop
        end_section(loop)
        self._count_steps()
        own = [self._asked, self.signals.received, state.stop_reason, self._are_others_back(0.0)]
        requests = loop.world.gather(own, "what ranks ask for")
        asked, signals, reasons, backs = zip(*requests, strict=True)
        self._asked = [score for scores in asked for score in scores]
        state.stop_reason = next((reason for reason in reasons if reason is not None), None)
        if self._asked or (self._save_every and not state.step % self._save_every):
            self._checkpoint()
        if (signum := next((s for s in signals if s is not None), None)) is not None:
            self._interrupt(signum)
        if state.stop_reason is not None or state.step_in_epoch == state.steps_per_epoch:
            return True
        if any(backs):
            if not loop.is_saved:
                self._checkpoint()
            self.takes_back = True
            loop.say(f"{self._who_is_back()}: all ranks continue from {self._path}")
        return self.takes_back

    def _who_is_back(self) -> str:
        ranks = self.loop.stepper.strategy.dropped()
        who = ", ".join(map(str, ranks))
        return (
            f"rank {who} has joined again" if len(ranks) == 1 else f"ranks {who} have joined again"
        )

    def _are_others_back(self, every_s: float = 1.0) -> bool:
        if not self.may_take_back or not self.loop.world.is_first or self.loop.run is None:
            return False
        if every_s:
            now = time.monotonic()
            if now < self._look_for_them_at + every_s:
                return False
            self._look_for_them_at = now
        return are_back(self.loop.stepper.strategy.dropped())

    def _optimizer_steps(self, quiet: Callable[[], int]) -> Iterator[None]:
        """Train on the rest of the epoch, and yield after optimizer steps."""
        loop, compute, stepper = self.loop, self.compute, self.loop.stepper
        graphs = graphs_of(stepper)
        batches = loop.batches(self.source)
        for callback in self.callbacks:
            batches = callback.watched_batches(self.state, batches)
        while True:
            batch, before = None, loop.step_count
            if graphs.compiled is not None and self._count is None:
                batch = captured_steps(loop, compute, batches, quiet(), self._is_asked_to_stop)
            if loop.step_count > before:
                yield
                if batch is None:
                    continue
            if batch is None and (batch := self._next(batches)) is None:
                break
            stepper.wants_to_stop = self._is_asked_to_stop()
            if loop.progress.job_changes != self._job_changes:
                self._job_changes, self._count = loop.progress.job_changes, operator_count(loop)
            if self._counted(batch) if self._count is not None else loop.step(compute, batch):
                yield
        if loop.flush(compute):
            yield

    def _others_go_on(self) -> bool:
        state, stepper = self.state, self.loop.stepper
        wants = state.stop_reason is not None
        if stepper.strategy.steps_apart:
            return wants and self.loop.world.size > 1
        if stepper.stopping or state.step_in_epoch == state.steps_per_epoch:
            return False  # all ranks exchange their reasons now
        return not self.loop.world.all_ask(wants) and wants

    def _is_asked_to_stop(self) -> bool:
        return self.signals.received is not None or self._own_reason is not None

    def _counted(self, batch: Batch) -> bool:
        assert self._count is not None
        with counting(self._count, self.loop) as is_whole:
            stepped = self.loop.step(self.compute, batch)
        if not is_whole():
            self._count = None
        elif stepped:
            self.state.history.roofline = counts = counted(self._count, self.loop)
            self._count = None
            if self.loop.tuner is not None:
                self.loop.tuner.expect(counts)
        return stepped

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        try:
            return next(batches, None)
        except Exception as error:
            # Ctrl-C on a terminal also ends the processes that read data. No step was begun. If
            # several ranks wait for data, no checkpoint is written: their steps may differ.
            together = isinstance(error, WaitStopped) and self.loop.world.size > 1
            if self.signals.received is not None and not together:
                self._interrupt(self.signals.received)
            raise

    def _end_epoch(self, began: float) -> None:
        state, loop = self.state, self.loop
        loop.check_numbers(self.compute)
        loop.meet_others()
        loop.tell_skipped(self.source)
        loop.tell_overflows()
        state.history.skipped_steps = self._skipped_before + loop.skipped_steps
        if self._is_time_to_compare():
            after = f"after epoch {state.epoch + 1}"
            loop.stepper.strategy.check_alike(self.objective.model, loop.world, after)
        logs = {"loss": loop.mean_loss(), **self._results()}
        self._check_loss(logs["loss"])
        state.logs = logs
        if self.validation is not None and validates(self._validation_freq, state.epoch):
            self._validate(self.validation, logs)
        self._report_not_finite(logs)
        self._schedule_epoch(logs)
        logs["seconds"] = time.perf_counter() - began
        state.history.first_epoch = state.epoch - len(state.history.epochs)
        state.history.epochs.append(logs)
        self._take_notes()
        self._call("on_epoch_end")
        loop.finish_epoch(logs)
        state.step_in_epoch = 0
        self.job.reset()
        if self._asked or (loop.run is not None and not loop.asked.recipe.save.every):
            self._checkpoint()
        if (signum := self._asked_to_stop()) is not None:
            self._interrupt(signum)

    def _is_time_to_compare(self) -> bool:
        is_last = self.state.epoch + 1 >= self.state.epochs
        is_due = is_last or time.monotonic() > self._compare_at
        if self.loop.world.from_first(is_due, "time to compare the replicas"):
            self._compare_at = time.monotonic() + _COMPARE_EVERY_S
            return True
        return False

    def _take_notes(self) -> None:
        self.state.history.notes.extend(self._times.end_epoch(self.loop.notes()))

    def _results(self) -> dict[str, float]:
        return self.job.results(self.loop.world)

    def _report_not_finite(self, logs: dict[str, float]) -> None:
        names = [name for name in guard.not_finite(logs) if name not in self._reported]
        self._reported.update(names)
        if names and self.loop.world.is_first:
            is_validated = any(name.startswith("val_") for name in names)
            source = self.validation if is_validated else None
            self.loop.note(guard.not_finite_words(names, f"epoch {self.state.epoch + 1}", source))

    def _check_loss(self, loss: float) -> None:
        if math.isfinite(loss) or not self.loop.progress.step_in_epoch:
            return
        scaled = self.loop.stepper.scaler is not None
        raise NumbersError(
            f"the mean loss of epoch {self.state.epoch + 1} is {loss}, "
            + ("and steps were left out" if scaled else "though gradients were finite"),
            do="look at the loss function for values that carry no gradient"
            if not scaled
            else "look for bad values in the data, or use precision bf16, which needs no scaling",
        )

    def _validate(self, source: Source, logs: dict[str, float]) -> None:
        """Add the `val_` figures; a stop signal ends the validation, and a resume repeats it."""
        start = self._now()
        before = random_state()
        # With several ranks, no rank may leave alone: they agree after the next step.
        alone = self.loop.world.size == 1

        def stopped() -> bool:
            return alone and self.signals.received is not None

        graph, later = self.loop.evaluation.graph, range(self.state.epoch + 1, self.state.epochs)
        graph.passes_left = sum(validates(self._validation_freq, epoch) for epoch in later)
        try:
            result = self.objective.evaluate(self.loop, source, stopped)
        except WaitStopped:
            if not alone:
                raise
            result = None
        finally:
            graph.passes_left = None
        self._add("evaluation", start)
        if result is None:
            assert self.signals.received is not None
            set_random_state(before)
            self._interrupt(self.signals.received)
        self.state.history.confusion = self.objective.confusion
        logs.update({f"val_{name}": value for name, value in result.items()})
        self._call("on_evaluate_end")

    def _per_step_scheduler(self) -> Any:
        scheduler = self.objective.scheduler
        if self.objective.schedule_every != "step" or _is_plateau(scheduler):
            return None
        return scheduler

    def _plateau_figure(self, figures: Figures) -> Monitor | None:
        """Return the figure that ReduceLROnPlateau follows, if its mode fits the figure."""
        scheduler, named = self.objective.scheduler, self.objective.monitor
        if not _is_plateau(scheduler):
            return None
        name = named or ("loss" if self.validation is None else "val_loss")
        words = "ReduceLROnPlateau would lower the learning rate while the figure improves"
        check_mode(name, scheduler.mode, words)
        result = Monitor(name, scheduler.mode)
        result.check(figures)
        return result

    def _schedule_epoch(self, logs: dict[str, float]) -> None:
        scheduler, figure = self.objective.scheduler, self._plateau
        if figure is not None:
            # An epoch without validation has no such figure; a training figure cannot replace it.
            if not figure.name.startswith("val_") or any(n.startswith("val_") for n in logs):
                scheduler.step(figure.read(logs))
        elif scheduler is not None and self.objective.schedule_every == "epoch":
            scheduler.step()

    # -- checkpoints and stopping --------------------------------------------------------------

    def _checkpoint(self) -> str:
        start = self._now()
        self.loop.check_numbers(self.compute)
        self.files.restore_folder(self.state.history)
        asked, self._asked = self._asked, []
        score = next((score for score in asked if score is not None), None)
        self._path = self.loop.save(self.state_dict(), score, {"metrics": self.job.state_dict()})
        self._add("saving", start)
        self._call("on_checkpoint", self._path)
        return self._path

    def _asked_to_stop(self) -> int | None:
        world = self.loop.world
        if world.size == 1:
            return self.signals.received
        if not self.loop.stepper.stopping:
            return None
        own = self.signals.received, self._own_reason
        signals, reasons = zip(*world.gather(own, "what ranks ask for"), strict=True)
        if self.state.stop_reason is None:
            self.state.stop_reason = next(
                (reason for reason in reasons if reason is not None), None
            )
        return next((signum for signum in signals if signum is not None), None)

    def _interrupt(self, signum: int) -> NoReturn:
        loop = self.loop
        path = self._last_checkpoint()
        name = "^C" if signum == signal.SIGINT else signal.Signals(signum).name
        prompt = signum == signal.SIGINT and is_interactive()
        loop.say(
            f"{name} step {self.state.step:,} -> checkpoint {path}"
            f"{'' if prompt else f', exit {128 + signum}'}; "
            f"go on with Trainer(..., run={loop.run!r}).fit(..., resume=True)"
        )
        if prompt:
            raise KeyboardInterrupt
        raise Interrupted(signum, path)

    def _last_checkpoint(self) -> str:
        """Write a checkpoint into the first of three folders that can be written.

        These are the run folder, a folder in the working directory, and a temporary folder.
        """
        loop = self.loop
        other = f"runs/{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
        others = [other]
        with suppress(OSError):
            others.append(f"{tempfile.gettempdir()}/flatout-{other}")
        others = loop.world.from_first(others)
        while True:
            if loop.run is None:
                loop.run = others.pop(0)
            try:
                with suppress(CheckpointError):
                    loop.checkpointing.wait()  # ignores a failure of an earlier write
                path = self._path if self._path and loop.is_saved else self._checkpoint()
                loop.checkpointing.wait()
                return path
            except CheckpointError as error:
                if not others:
                    raise
                loop.say(f"{first_line(error)}: {loop.run}; another folder is tried")
            self._path = None
            with suppress(CheckpointError):
                loop.checkpointing.close()
            del loop.checkpointing  # it is created again for the next folder
            loop.run = None

    def _now(self) -> tuple[int, int]:
        return time.perf_counter_ns(), self.loop.world.collectives.waited

    def _add(self, lane: str, start: tuple[int, int]) -> None:
        now, waited = (after - before for after, before in zip(self._now(), start, strict=True))
        self.loop.timeline.add(lane, now - waited)
        if waited:
            self.loop.timeline.add("sync", waited)

    def _call(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            self._guard(callback, event, self.state, *arguments)


def _is_plateau(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
