"""The parts of Flatout for a user's own training loop; the Trainer is built on them.

    loop = flatout.Loop(run="runs/mine")
    model, optimizer = loop.prepare(model, optimizer, compute=compute, data=source, steps=...)
    for epoch in loop.epochs(5):
        for batch in loop.batches(source):
            loop.step(compute, batch)
        print(epoch, loop.mean_loss())
    loop.save()
    loop.close()

`compute(batch)` runs forward and loss of one batch and returns a mean over its samples, or (sum,
weight).

    loop_state.py: the state of a Loop.
    decide.py: settings, decided on the first batches.
    start_tuning.py: settings, decided on the job's steps.
    checkpointing.py: the run folder.
    resume/: continuing from a checkpoint in the run folder.
    step.py: one optimizer step.
    parts/: objects that act around a step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import nn

from flatout.data import Batch, Source
from flatout.devices import process
from flatout.errors import ModelError
from flatout.measure import cuda_lanes, require_proc
from flatout.models import adapter_of, calls_hooks, has_compiled
from flatout.optim import Optimizers, as_tuple
from flatout.recipe import ResolvedRecipe, dumps
from flatout.strategies import check_replicas
from flatout.train import guard
from flatout.train.decide import decide, make_stepper
from flatout.train.device_data import DeviceData, room
from flatout.train.freezing_checks import freezing_lines
from flatout.train.graphs.graphs import DeviceTimes
from flatout.train.loop_state import LoopState, Scheduler
from flatout.train.losses.loss_value import Compute
from flatout.train.objective_checks import check_optimizers
from flatout.train.part import Part, Step
from flatout.train.parts.explain_errors import ExplainErrors, IdChecks
from flatout.train.parts.first_step import FirstStepChecks, TrainingMode
from flatout.train.parts.monitor import Monitor
from flatout.train.parts.numbers import NumbersGuard, StepFacts
from flatout.train.parts.order import ORDER, features_of
from flatout.train.parts.other_job import OtherJob
from flatout.train.parts.rounding_watch import RoundingWatch
from flatout.train.parts.table_rows import TableRows
from flatout.train.prepare import first_batches, follow_rule, place_model
from flatout.train.profiled import bytes_per_sample, model_facts
from flatout.train.rank_trial import RankTrial, is_trial
from flatout.train.rehearsal import rehearse
from flatout.train.resume.resume import find_checkpoint, own_state_of, state_of
from flatout.train.running_mean import mean_of
from flatout.train.settings import Switch
from flatout.train.start_tuning import capture_steps, report_tables, tune
from flatout.train.step import Stepper
from flatout.train.turn import Turn, check_gathered

# The type of `prepare`'s optimizer argument and result: one optimizer, or several.
_Given = TypeVar("_Given", bound=Optimizers)


class Loop(LoopState):
    """Everything around a training step: settings, steps, guard, timeline, checkpoints.

    Args:
        recipe: requested settings, or the path of their TOML file. Settings that are left open are
            decided by measuring.
        allow: largest permitted difference from the plain job: "exact", "tolerant", "redrawn".
        seed: integer that, with epoch and sample index, decides the random order of samples.
        accumulate: number of batches whose gradients are accumulated for an optimizer step.
        clip_norm: largest total 2-norm of the gradients, or None.
        clip_value: largest absolute gradient element, or None.
        lr_rule: a `flatout.LrRule`, which scales a learning rate that was found with another
            global batch size; None leaves the learning rate unchanged.
        parts: the user's own Parts, which act around each step (`flatout.Part`).
        run: folder (or fsspec URL) for checkpoints and logs; None writes nothing.
        resume: True for the latest checkpoint of `run`, or the name of one.
        say: function that prints decisions; `lambda line: None` for silence.

    Attributes:
        numbers: checks whether each step's numbers are finite, from `prepare` on.
        rounding: compares gradients in bf16 with those in fp32 now and then, from `prepare` on.

    See `LoopState` for further attributes.
    """

    numbers: NumbersGuard
    rounding: RoundingWatch
    _other_job: OtherJob | None = None
    _trial: RankTrial | None = None
    # Exception that was being handled when training began, so it does not count as the cause.
    _earlier_error: BaseException | None = None

    # -- before training ---------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module,
        optimizer: _Given,
        scheduler: Scheduler | None = None,
        *,
        compute: Compute | None = None,
        data: Source | None = None,
        steps: int | None = None,
    ) -> tuple[nn.Module, _Given]:
        """Place the model, decide and apply the settings, and resume if that was asked for.

        Args:
            model: the user's own object; it is changed in place. Several models are one
                `nn.ModuleDict`.
            optimizer: any torch optimizer over its parameters, or a list of several.
            scheduler: a scheduler or a list of several, which are saved and resumed. The caller
                steps them.
            compute: forward and loss of one batch. With `data`, open settings are measured.
            data: source whose first batches are used to measure, and are kept for training.
            steps: planned number of optimizer steps, by which the time for measuring is limited.

        Raises:
            DeviceError: for a device that this machine lacks.
            DataError: for data that do not fit the model, or differ from the checkpoint's.
            ModelError: for an optimizer of another model, a model whose parameters are all frozen,
                and a learning-rate rule without a known batch size.
            CheckpointError: for a run folder that cannot be written or holds another fit, and a
                checkpoint that is damaged or belongs to another job.
        """
        require_proc()
        self._earlier_error = sys.exception()
        world = self.world  # joins the ranks; from here on only the first rank prints
        for line in self.asked.words:
            self.say(line)
        self.model, self.optimizers = model, as_tuple(optimizer)
        if not self.optimizers:
            raise ModelError(
                "prepare was given no optimizer", do="give it one, or a list of several"
            )
        self.schedulers = _listed(scheduler)
        if self.asked.recipe.process.threads == "auto":
            self.undo.callback(torch.set_num_threads, torch.get_num_threads())
        find_checkpoint(self, compute)
        check_optimizers(model, self.optimizers)
        if self.identity.trainer is None:
            for line in freezing_lines(model, self.optimizers):
                self.say(line)
        if self.run is not None:
            self.checkpointing.begin()
        for line in process.apply(self.asked.recipe.process):
            self.say(line)
        elsewhere = place_model(self, model)
        first = first_batches(self, data, compute)
        facts = None if self.run is None else (model_facts(model), bytes_per_sample(first))
        self._decide(compute, first, steps)
        self._prepare_parts()
        if self.resume is not None:
            self.resume.put_back(self)
            self.progress.saved, self.progress.first_step = (
                (self.epoch, self.step_count),
                self.step_count,
            )
        elif world.is_first:
            self.stepper.notes += elsewhere  # after a resume the History has these notes
        report_tables(self, first)
        follow_rule(self)
        if self.identity.trainer is not None:
            self._keep_features(model)
        elif self.asked.recipe.input.features in ("memory", "disk"):
            self.say("features: a Loop keeps no features of frozen layers, only a Trainer does")
        self._attach_own_parts()
        capture_steps(self, compute, None if self.tuner is None else self.tuner.search)
        if not self.takes_whole_batches:
            check_replicas(model, world, "at the start")
        if is_trial():
            tunes = partial(getattr, self.tuner, "is_searching", False)
            self._trial = RankTrial(lambda: self.step_count, tunes, world.is_first)
        self.monitor.begin(facts)
        return model, optimizer

    def _prepare_parts(self) -> None:
        self.stepper.chain.add(*self.asked.parts)
        for part in self.asked.parts:
            self.undo.push(partial(_close_part, part))
            part.prepare(self)

    def _attach_own_parts(self) -> None:
        self.rounding = RoundingWatch(self)
        # A Trainer checks its loss itself, since it knows outputs and targets.
        checks = FirstStepChecks(self, checks_loss=self.identity.trainer is None)
        own = [self.numbers, self.monitor, ExplainErrors(self), TrainingMode(self), checks]
        if self.rounding.next_step < sys.maxsize:
            own.append(self.rounding)
        if self._other_job is not None:
            own.append(self._other_job)
        if self.device.type == "cpu" and not calls_hooks(self.model):
            own.append(IdChecks(self))
        if self.device.type == "cuda":
            self.stepper.lanes = cuda_lanes(self.timeline, self.device)
            own.append(DeviceTimes(self.stepper.lanes))
        self.stepper.chain.add(*own)

    def drop(self, part: Part) -> None:
        """Let one of the user's Parts act no longer, from the next step on.

        Its state is still saved, and it is closed with the others.
        """
        self.stepper.chain.drop(part)

    @cached_property
    def monitor(self) -> Monitor:
        """The Part that shows and records the steps."""
        return Monitor(self)

    def _decide(self, compute: Compute | None, first: list[Batch], steps: int | None) -> None:
        self._stepper, self.identity.model = make_stepper(self, compute, first, ORDER)
        if any(adapter_of(self.model).tables()):
            self._stepper.chain.add(TableRows(self))
        # If all ranks compute layers together, changes of the trained parameters are not watched.
        if compute is not None and first and not self.lays_out and not self.has_servers:
            self._other_job = OtherJob(self, steps)
        self.resolved, decision = decide(self, self.identity.model, compute, first, steps)
        self.numbers = NumbersGuard(
            self.stepper, self.world, self.feed.first, self._latest, lambda: self.feed.source
        )
        self.feed.channels_last = self.resolved.compute.memory_format == "channels_last"
        if self.resolved.input.on_device == "on":
            self.feed.device_data = DeviceData(self.device, room(self.device))
        if decision.search is not None:
            tuner = tune(self, decision, self._notice_other_job)
            if compute is not None and has_compiled(self.model):
                rehearse(tuner, self.stepper, compute, first)

    def _notice_other_job(self) -> None:
        if self._other_job is not None:
            self._other_job.notice()

    def be_ready(self, model: nn.Module) -> None:
        """Place a model that is evaluated before training."""
        if self.resolved is None:
            place_model(self, model)
        if self.feed.features is None:
            self.feed.features = features_of(self, model)

    def _keep_features(self, model: nn.Module) -> None:
        self.feed.features = features = features_of(self, model)
        if features is not None:
            self.undo.callback(features.close)

    def follow(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, resolved: ResolvedRecipe
    ) -> None:
        """Prepare an evaluation in this process, at the precision that other ranks trained at."""
        self.model, self.optimizers, self.resolved = model, (optimizer,), resolved
        place_model(self, model)
        switch = Switch(model, optimizer, self.device)
        switch.now = switch.now.but(precision=resolved.compute.precision)
        self._stepper = Stepper(switch)

    # -- training ----------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield epoch numbers from the present epoch (after a resume not 0) up to `total`.

        Raises:
            NumbersError: at the end of an epoch, as `check_numbers` does.
        """
        self.progress.planned_epochs = total
        while self.epoch < total:
            yield self.epoch
            self.check_numbers()
            self.tell_overflows()
            self.finish_epoch()

    def finish_epoch(self, figures: Mapping[str, float] | None = None) -> None:
        """Count the epoch and forget its loss.

        Args:
            figures: the epoch's figures, for the Profile of a run folder; None takes the mean loss.
        """
        if (recording := self.monitor.recording) is not None:
            recording.end_epoch({"loss": self.mean_loss()} if figures is None else figures)
        self.progress.epoch += 1
        self.progress.step_in_epoch = 0
        self.progress.batch_in_epoch = self.feed.taken = 0
        for turn in self.stepper.turns:
            turn.mean_loss.reset()

    def batches(self, source: Source) -> Iterator[Batch]:
        """Return this epoch's batches on the device, from where a resume left off.

        Raises:
            DataError: where the source cannot yield them, or a resume finds other data.
        """
        self.feed.source = source
        if self.resume is not None:
            self.resume.put_back_source(source)
        self.feed.taken = self.progress.batch_in_epoch
        if self._other_job is not None:
            self._other_job.look()
        whole = self.takes_whole_batches
        batches = self.feed.batches(
            self.world, self.note, self.epoch, self.progress.planned_epochs, whole=whole
        )
        # A fit reports skipped rows at the end of its epochs, where all ranks communicate.
        return batches if self.identity.trainer is not None else self._told_at_end(batches, source)

    def _told_at_end(self, batches: Iterator[Batch], source: Source) -> Iterator[Batch]:
        yield from batches
        self.tell_skipped(source)

    def step(self, compute: Compute, batch: Batch, optimizer: Optimizers | None = None) -> bool:
        """Train on one batch; return whether that completed an optimizer step.

        Gradients that other losses have left in the parameters are dropped.

        Args:
            compute: forward and loss of the batch, or of each micro-batch.
            batch: a batch on the device, from `batches`.
            optimizer: the optimizers that step, one or a list; None for all together. With
                `accumulate`, batches are counted separately for each such set of optimizers.

        Raises:
            NumbersError: where gradients were not finite; the weights are those before the step. On
                several ranks, the rank whose part of the batch is the cause raises it.
            OutOfMemory: where no allowed micro-batch fits.
            ModelError: the loss has no graph; in the first step, output and targets differ in shape
                and broadcast, or `compute` calls `backward` itself.
            FlatoutError: `prepare` was not given this optimizer.
        """
        stepper = self.stepper
        turn = stepper.joint if optimizer is None else stepper.turns.of(optimizer)
        if not turn.gathered:
            turn.gathered_from = self.feed.taken
        turn.gathered.append(batch)
        return len(turn.gathered) >= self.asked.accumulate and self._flush(compute, turn)

    def flush(self, compute: Compute, optimizer: Optimizers | None = None) -> bool:
        """Make an optimizer step of the batches accumulated so far, as at the end of an epoch."""
        return self._flush(compute, self.stepper.turns.of(optimizer))

    def _flush(self, compute: Compute, turn: Turn) -> bool:
        if not turn.gathered:
            return False
        batches = tuple(turn.gathered)
        turn.gathered.clear()
        self._step(Step(self.next_step, batches, compute, turn))
        return True

    def _latest(self, batches: int) -> StepFacts:
        rate = self._rate_of(self.stepper.turn)
        return StepFacts(self.next_step, self.epoch, self.feed.taken - batches, batches, rate)

    def _step(self, step: Step) -> None:
        self.feed.begin_step()
        stepper, turn = self.stepper, step.turn
        done = stepper(step)
        turn.has_stepped = True
        self.count_step()
        turn.mean_loss.add(done.loss, done.weight)
        for act in stepper.chain.after_step:
            act(step, done)

    def mean_loss(self, optimizer: Optimizers | None = None) -> float:
        """Return the weighted mean loss of this epoch so far; waits for the device.

        Args:
            optimizer: one optimizer or several, whose joint steps count; None for all steps.
        """
        stepper = self.stepper
        turns = stepper.turns if optimizer is None else [stepper.turns.of(optimizer)]
        result = mean_of([turn.mean_loss.state_dict() for turn in turns])
        self.timeline.settle()  # the device has completed all steps
        return result

    def step_loss(self) -> float:
        """Return the loss of the latest step, over all its batches and ranks.

        The call waits for the device.
        """
        return self.stepper.turn.mean_loss.last

    def notes(self) -> list[str]:
        """Return and clear the notes for the user since the last call."""
        notes, self.stepper.notes = [*self.stepper.notes, *self.feed.notes()], []
        self.monitor.keep_notes(notes)
        return notes

    def check_numbers(self, compute: Compute | None = None) -> None:
        """Check the steps that are still unchecked, and the weights, for NaN and infinity.

        Call it before evaluating or saving. An update can make NaN from finite gradients: with
        eps=0, with weights in half precision, or at a huge learning rate.

        Args:
            compute: function that repeats a bad step to find the cause; by default the step's own
                function.

        Raises:
            NumbersError: names the first bad step, or weights that an update made bad.
        """
        self.numbers.check(compute)

    # -- checkpoints -------------------------------------------------------------------------

    def save(self, extra: Any = None, score: float | None = None, own: Any = None) -> str:
        """Write a checkpoint of everything, and return its path. A resume from it is bitwise.

        Args:
            extra: more state of the caller: numbers, strings, lists, dicts, tensors. With several
                ranks, the first rank's state is kept.
            score: number for this checkpoint; the checkpoint with the smallest score is kept in
                addition to the newest.
            own: further state of the same kinds, which is kept for each rank.

        Raises:
            NumbersError: if a weight or buffer is not finite.
            CheckpointError: if this checkpoint or the previous one could not be written, or if a
                resume would lose batches that wait to make a step.
        """
        assert self.resolved is not None
        check_gathered(self.stepper.turns, self.step_count, self.progress.batch_in_epoch)
        self.meet_others()
        self.stepper.switch.settle_rows()
        guard.check_state(self.model, "saving")
        path = self.checkpointing.write(
            self.step_count,
            self.weights(kept=self.checkpointing.keeps),
            state_of(self, extra),
            own_state_of(self, own),
            meta={"recipe": dumps(self.resolved)},
            score=score,
            metadata=self.trainer.metadata,
        )
        self.progress.saved = (self.epoch, self.step_count)
        self.monitor.meet()
        return path

    def end_tuning(self) -> None:
        """End tuning at the end of training, without trying the remaining options."""
        if self.tuner is not None:
            self.tuner.stop("the run ended")

    def close(self, error: BaseException | None = None) -> None:
        """Undo changes of the model's code and of torch's settings, and finish saving.

        Args:
            error: the exception that ended training. Within `except` and `finally` it is found
                automatically, unless it was being handled already when `prepare` was called.

        Raises:
            CheckpointError: if the last checkpoint could not be written.
        """
        earlier, self._earlier_error = self._earlier_error, None
        if error is None and sys.exception() is not earlier:
            error = sys.exception()
        if error is None:
            self.end_tuning()
        self.monitor.end(error)
        if error is None:  # after an error other ranks may not communicate
            if self._stepper is not None:
                self._stepper.switch.gather_rows()
            if self._trial is not None:
                self._trial.end()
        self.evaluation.graph.close()
        self.timeline.stop()
        self.monitor.close(error)
        self.undo.__exit__(None if error is None else type(error), error, None)
        if "checkpointing" in vars(self):
            self.checkpointing.close(error)


def _close_part(part: Part, kind: object, error: BaseException | None, trace: object) -> None:
    part.close(error)


def _listed(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)
