"""The pieces of Flatout for a training loop of one's own; the Trainer is written on them.

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

    decide.py           settings, decided on the first batches
    checkpointing.py    the run folder;  resume.py: going on from a checkpoint in it
    step.py             one optimizer step;  numbers_guard.py: whether its numbers are finite
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any, TypeVar

import torch
from torch import nn

from flatout.console import say
from flatout.data import Batch, Source
from flatout.devices import Placement, process
from flatout.errors import FlatoutError, ModelError
from flatout.measure import Live, Timeline
from flatout.optim import LrRule, LrScale, Optimizers, as_tuple
from flatout.recipe import ModelFacts, Parity, Recipe, ResolvedRecipe, dumps
from flatout.save import Checkpoints, LoadedCheckpoint
from flatout.strategies import check_replicas
from flatout.train import guard
from flatout.train.auto import Decision, captured_line, settle
from flatout.train.auto_capture import Beside
from flatout.train.auto_search import Search
from flatout.train.broadcast import watched
from flatout.train.capture import Capture
from flatout.train.checkpointing import Checkpointing, no_run_folder
from flatout.train.decide import decide, make_stepper
from flatout.train.evaluate_batch import EvaluateBatch
from flatout.train.evaluate_graph import EvaluateGraph
from flatout.train.features import FrozenFeatures
from flatout.train.feed import Feed
from flatout.train.large_batch import as_rule
from flatout.train.micro_batch import Parts
from flatout.train.numbers_guard import NumbersGuard, Step
from flatout.train.other_job import OtherJob
from flatout.train.preflight import explain_one_sample
from flatout.train.prepare import first_batches, follow_rule, place_model, show
from flatout.train.rank_device import device_here
from flatout.train.rank_trial import RankTrial, is_trial
from flatout.train.rehearsal import is_compiled, rehearse
from flatout.train.requested import requested_here
from flatout.train.resume import Resume, job_of, own_state_of, state_of
from flatout.train.row_tables import Tables
from flatout.train.running_mean import mean_of
from flatout.train.settings import Settings, Switch
from flatout.train.step import Compute, Stepper
from flatout.train.stragglers import Pace
from flatout.train.tables import explain_ids
from flatout.train.tuner import Tuner
from flatout.train.turn import Turn, check_gathered
from flatout.train.watch_calls import Calls
from flatout.world import ONE, World, join, restarts, share_cpus

Scheduler = Any  # torch's schedulers share no base class that covers ReduceLROnPlateau


# What prepare was given and gives back: one optimizer, or several.
_Given = TypeVar("_Given", bound=Optimizers)


class Loop:
    """Everything around a training step: settings, steps, guard, timeline, checkpoints.

    Args:
        recipe: requested settings; what they leave open is decided by measuring.
        allow: how far the result may differ from the plain job: "exact", "tolerant", "redrawn".
        seed: decides the sample order together with epoch and sample number.
        accumulate: batches whose gradients make one optimizer step.
        clip_norm: largest total 2-norm of the gradients, or None.
        clip_value: largest absolute gradient element, or None.
        lr_rule: how the learning rate follows the global batch, where the optimizer's rate was
            found with another one (`flatout.LrRule`); None leaves it as it is.
        run: folder (or fsspec URL) for checkpoints and logs; None writes nothing.
        resume: True for the latest checkpoint of `run`, or the name of one.
        say: what prints decisions; `lambda line: None` for silence.

    Attributes:
        epoch: number of the current epoch, from 0.
        step_count: optimizer steps done since training began (a resume goes on counting).
        step_in_epoch: optimizer steps done in this epoch.
        batch_in_epoch: batches of this epoch that were taken up to the last step.
        resolved: how the steps run; None before `prepare`.
        lr_scale: what the learning-rate rule does, after `prepare`; None without a rule.
        parts: runs a batch of an evaluation, where memory runs out in parts.
        evaluate_batch: chooses how many samples an evaluation takes at a time.
        evaluate_graph: runs an evaluation's forward as one compiled graph.
        pace: of several ranks, what this one's steps take without waiting for others.
        planned_epochs: of the whole run, where that is known.
        shows_notes: whether a progress line says what is noted.
        tuner: tries settings on the steps; None where nothing was left open.
        facts: of the model, after `prepare`.
        restored_extra: after a resume, what was given to `save` as `extra`.
        restored_own: after a resume, what the ranks then gave to `save` as `own`, by rank.
        told: what a Trainer tells of its job, for a resume to compare; None without a Trainer.
        job: all that tells this job from others, as a checkpoint keeps it.
        fresh_groups: the optimizers' groups as `prepare` found them.
        feed: gives the batches.
        metadata: text that goes with the weights into checkpoints; as a Trainer sets it.
        ids: rows of ids, for checkpoints; as a Trainer sets it.
        resume: the checkpoint that this Loop went on from; None where there was none.
        undo: what `close` puts back.
        why_device: why this rank computes on its device.
    """

    def __init__(
        self,
        recipe: Recipe | ResolvedRecipe | None = None,
        *,
        allow: str = "tolerant",
        seed: int = 0,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        lr_rule: LrRule | None = None,
        run: str | Path | None = None,
        resume: bool | str = False,
        say: Callable[[str], None] = say,
    ) -> None:
        if accumulate < 1:
            raise FlatoutError(f"accumulate must be at least 1, found {accumulate}")
        self.say = say
        self.why_device = ""
        self.requested, self._first_words = requested_here(recipe)
        self.allow = Parity.from_name(allow)
        self.seed = seed
        self.accumulate = accumulate
        self.run = None if run is None or is_trial() else str(run).rstrip("/")
        self.timeline = Timeline()
        self.epoch = 0
        self.step_count = 0
        self.step_in_epoch = 0
        self.batch_in_epoch = 0
        self.resolved: ResolvedRecipe | None = None
        self.feed = Feed()
        self.first_samples: list[int] | None = None
        self.first_batch_size: int | None = None
        self.placement: Placement
        self.lr_scale: LrScale | None = None
        self.planned_epochs: int | None = None
        self.shows_notes = False
        self.tuner: Tuner | None = None
        self.facts = ModelFacts()
        self._other_job: OtherJob | None = None
        self.restored_extra: Any = None
        self.restored_own: list[Any] = []
        self.clip = (clip_norm, clip_value)
        self.told: dict[str, list[str]] | None = None
        self.job: dict[str, Any] = {}
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.fresh_groups: list[list[dict[str, Any]]] = []
        self.metadata: dict[str, str] = {}
        self.ids: dict[str, Any] | None = None
        self.lr_rule = as_rule(lr_rule)
        # After a rank was killed all start again, and go on where the last checkpoint was.
        self._resume = not is_trial() and (resume or (run is not None and restarts() > 0))
        self.resume: Resume | None = None
        self._saved: tuple[int, int] | None = None
        self.undo = ExitStack()
        self._stepper: Stepper | None = None
        self._trial: RankTrial | None = None
        self._live: Live | None = None
        self.pace = Pace(ONE.collectives)
        self.parts = Parts(lambda line: self.say(line))
        self._tables_said = ""
        self.evaluate_batch = EvaluateBatch(self.tell)
        self.evaluate_graph = EvaluateGraph(self.tell, self._may_compile)

    @cached_property
    def world(self) -> World:
        """The ranks that train together; asked for the first time, they meet.

        From then on the first speaks for all.

        Raises:
            WorldError: they do not come.
        """
        device, asked = device_here(self.requested.world)[0].type, self.requested.world
        world = join(device, asked.timeout, asked.patience)
        if not world.is_first:
            self.say = lambda line: None
        if device == "cpu":
            share_cpus(world, self.requested.process)
        return world

    @property
    def stepper(self) -> Stepper:
        """Makes the steps.

        Raises:
            FlatoutError: `prepare` was not called.
        """
        if self._stepper is None:
            raise FlatoutError("the Loop has no model yet", do="call loop.prepare(...) first")
        return self._stepper

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.feed.device

    @property
    def together(self) -> World:
        """The ranks that run the same code right now: all within a step, else this one alone."""
        return ONE if self._stepper is None else self._stepper.together

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
        """Place the model, decide the settings and switch to them; resume if that was asked for.

        Args:
            model: the user's own object; it is changed in place. Several models are one
                `nn.ModuleDict`.
            optimizer: any torch optimizer over its parameters, or a list of several.
            scheduler: saved and resumed with the rest, or a list of several; stepping them is the
                caller's.
            compute: forward and loss of one batch. With `data`, open settings are measured.
            data: where the first batches come from; they are not used up.
            steps: optimizer steps that are planned, so that measuring costs its share at most.

        Raises:
            DeviceError: for a device that is not here.
            DataError: for data that do not fit the model, or are not those of the checkpoint.
            ModelError: for a learning-rate rule where nothing tells the size of a batch.
            CheckpointError: for a run folder that cannot be written or holds another fit, and a
                checkpoint that is damaged or of another job.
        """
        world = self.world  # from here on the first rank speaks for all
        for line in self._first_words:
            self.say(line)
        self.model, self.optimizers = model, as_tuple(optimizer)
        if not self.optimizers:
            raise ModelError(
                "prepare was given no optimizer", do="give it one, or a list of several"
            )
        self.schedulers = _listed(scheduler)
        if self.requested.process.threads == "auto":
            self.undo.callback(torch.set_num_threads, torch.get_num_threads())
        self._find_checkpoint(compute)
        if self.run is not None:
            self.checkpointing.begin()
        for line in process.apply(self.requested.process):
            self.say(line)
        elsewhere = place_model(self, model)
        first = first_batches(self, data, compute)
        self._decide(compute, first, steps)
        if self.resume is not None:
            self.resume.put_back(self)
            self.restored_own = self.resume.own
            self._saved = (self.epoch, self.step_count)
        elif world.is_first:
            self.stepper.notes += elsewhere  # after a resume the History has them
        self._tell_of_tables(first)
        follow_rule(self)
        # A Trainer's loss calls the model with what it is given.
        calls = Calls(model) if self.told is None else None
        self.feed.features = FrozenFeatures(self, model, calls)
        self.undo.callback(self.feed.features.close)
        self.capture_steps(compute, None if self.tuner is None else self.tuner.search)
        if not self.takes_whole_batches:
            check_replicas(model, world, "at the start")
        if is_trial():
            tunes = partial(getattr, self.tuner, "is_searching", False)
            self._trial = RankTrial(lambda: self.step_count, tunes, world.is_first)
        self._live = show(self)
        return model, optimizer

    @cached_property
    def found(self) -> LoadedCheckpoint | None:
        """The checkpoint that `prepare` goes on from; None where there is none.

        Raises:
            CheckpointError: it is damaged, or there is one and no one asked to go on from it.
        """
        if self._resume or self.run is not None:
            return self.checkpointing.find(self._resume)
        return None

    def _find_checkpoint(self, compute: Compute | None) -> None:
        """What a resume goes on from, which may decide the settings."""
        loaded = self.found
        del self.found  # it holds all weights once more
        self.job = self.world.from_first(job_of(self, compute))
        self.fresh_groups = [[dict(group) for group in o.param_groups] for o in self.optimizers]
        if loaded is not None:
            self.resume = Resume(self, loaded)
            self.requested = self.resume.recipe(self)
            del self.checkpointing  # made again, as the saved settings say

    def _decide(self, compute: Compute | None, first: list[Batch], steps: int | None) -> None:
        """Resolve the Recipe on the first batches and switch to it; `close` switches back."""
        self._stepper, self.facts = make_stepper(self, compute, first)
        # Layers that all ranks compute together are not looked at again.
        if compute is not None and first and not self.lays_out:
            self._other_job = OtherJob(self, steps)
        self.resolved, decision = decide(self, self.facts, compute, first, steps)
        self._guard = NumbersGuard(self.stepper, self.world, self.feed.first, self._latest)
        self.feed.channels_last = self.resolved.compute.memory_format == "channels_last"
        if decision.search is not None:
            settle = partial(self.settle, decision)
            self.tuner = Tuner(
                decision.search, self.stepper, self.feed, self.world, settle, self.note,
                changed=self._notice_thaw,
            )  # fmt: skip
            if compute is not None and is_compiled(self.model):
                rehearse(self.tuner, self.stepper, compute, first)

    def _notice_thaw(self) -> None:
        """Other parameters train: settings are decided again, with the next step."""
        if self._other_job is not None:
            self._other_job.notice()

    def capture_steps(self, compute: Compute | None, search: Search | None) -> None:
        """Let the steps of this job run as one compiled graph, or have that tried.

        Args:
            compute: forward and loss of a batch.
            search: for the settings of this job, where these are not known.
        """
        assert self.resolved is not None
        stepper, tries = self.stepper, search is not None and search.captures
        is_asked = not tries and self.resolved.compute.capture == "on"
        if stepper.capture is not None:  # of the job before
            stepper.capture.close()
            stepper.capture = None
        if is_asked or tries:
            may_lend = self.requested.process.threads == "auto"
            capture = Capture(stepper, self.note, self._is_tuning, is_asked, may_lend)
            stepper.capture = capture
            self.undo.callback(capture.close)
            if self.tuner is not None and search is not None and tries:
                self.tuner.beside = Beside(capture, compute, search)

    def _is_tuning(self) -> bool:
        return self.is_other_job or (self.tuner is not None and self.tuner.is_searching)

    def _may_compile(self) -> bool:
        """Whether an evaluation may: nothing else is measured or compiled."""
        capture = None if self._stepper is None else self._stepper.capture
        if self._is_tuning() or self.evaluate_batch.is_measuring:
            return False
        return capture is None or capture.compiling is None

    @property
    def evaluated(self) -> dict[str, Any] | None:
        """How evaluations ran, as plain data; None where nothing was measured of them."""
        found = {"sizes": self.evaluate_batch.trials, "graphs": self.evaluate_graph.records()}
        return found if any(found.values()) else None

    @property
    def is_other_job(self) -> bool:
        """Whether other parameters train than those that settings were decided for."""
        return self._other_job is not None and self._other_job.is_due

    @property
    def thaws(self) -> int:
        """How many times other parameters began to train, or no longer did."""
        return 0 if self._other_job is None else self._other_job.count

    def settle(self, decision: Decision, tuner: Tuner) -> None:
        """What was tried is decided: it holds from the next step on."""
        assert self.resolved is not None
        self.resolved, line = settle(
            decision,
            self.resolved,
            self.requested,
            tuner.why,
            suffices=tuner.suffices,
            pending=tuner.is_pending,
        )
        if tuner.of_capture and tuner.beside is not None:
            line = captured_line(tuner.search, tuner.beside)
        if line:
            self.note(line)
        self._tell_of_tables([])

    def _tell_of_tables(self, first: list[Batch]) -> None:
        """Say how embedding tables are stepped, where that is by rows, or large ones cannot be."""
        switch, tables = self.stepper.switch, self.stepper.switch.tables
        if tables is None and first and self._may_step_by_rows():
            found = Tables.of(switch.model, switch.optimizers)
            tables = found if found.are_whole_though_large(first[0]) else None
        if tables is None or tables.words == self._tables_said:
            return
        self._tables_said = tables.words
        (self.note if self.resume is None else self.say)(tables.words)

    def _may_step_by_rows(self) -> bool:
        asked = self.requested.compute.touched_rows
        is_allowed = asked == "auto" and self.allow >= Parity.TOLERANT
        return self.device.type == "cpu" and (is_allowed or asked == "on")

    def be_ready(self, model: nn.Module) -> None:
        """Place a model that is evaluated before it was trained."""
        if self.resolved is None:
            place_model(self, model)
        if self.feed.features is None:
            self.feed.features = FrozenFeatures(self, model)

    @property
    def lays_out(self) -> bool:
        """Whether each rank is to hold a part of the model alone."""
        return self.world.size > 1 and self.requested.world.strategy in ("fsdp", "staged")

    @property
    def is_staged(self) -> bool:
        """Whether each rank is to hold some of the layers."""
        return self.lays_out and self.requested.world.strategy == "staged"

    @property
    def takes_whole_batches(self) -> bool:
        """Whether every rank is given each batch whole, for the model that all have together."""
        return self._stepper is not None and self._stepper.strategy.takes_whole_batches

    @property
    def meets_in_compute(self) -> bool:
        """Whether ranks wait for each other within the model's forward."""
        return self._stepper is not None and self._stepper.strategy.meets_in_compute

    def meet_others(self) -> None:
        """Make the ranks alike, where they step alone or have parts of tables; all call it."""
        if self._stepper is not None:
            self._stepper.meet_others()

    def settings_of(self, model: nn.Module) -> Settings:
        """How the model runs: as was decided, or as it is where nothing was."""
        if self._stepper is None:
            return Switch(model, (), self.device).now
        return self._stepper.switch.now

    def follow(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, resolved: ResolvedRecipe
    ) -> None:
        """Evaluate in this process, at the precision at which ranks elsewhere have trained."""
        self.model, self.optimizers, self.resolved = model, (optimizer,), resolved
        place_model(self, model)
        switch = Switch(model, optimizer, self.device)
        switch.now = switch.now.but(precision=resolved.compute.precision)
        self._stepper = Stepper(switch)

    # -- training ----------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Epoch numbers from the present one (after a resume not 0) up to `total`."""
        self.planned_epochs = total
        while self.epoch < total:
            yield self.epoch
            self.finish_epoch()

    def finish_epoch(self) -> None:
        """Count the epoch and forget its loss."""
        self.epoch += 1
        self.step_in_epoch = 0
        self.batch_in_epoch = self.feed.taken = 0
        for turn in self.stepper.turns.values():
            turn.tally.reset()

    def batches(self, source: Source) -> Iterator[Batch]:
        """This epoch's batches on the device, from where a resume left off.

        Raises:
            DataError: where the source cannot give them, or a resume finds other data.
        """
        self.feed.source = source
        if self.resume is not None:
            self.resume.put_back_source(source)
        self.feed.taken = self.batch_in_epoch
        if self._other_job is not None:
            self._other_job.look()
        whole = self.takes_whole_batches
        return self.feed.batches(
            self.world, self.note, self.epoch, self.planned_epochs, whole=whole
        )

    def ready(self, batch: Batch) -> Batch:
        """The batch on the device, in the memory format that was chosen."""
        return self.feed.ready(batch)

    def tell(self, line: str) -> None:
        """Note it while there is a History, else say it."""
        (self.say if self._stepper is None else self.note)(line)

    def note(self, line: str) -> None:
        """Say what the user should know, and keep it for the History of the rank that speaks."""
        if not self.shows_notes:
            self.say(line)
        if self.world.is_first:
            self.stepper.notes.append(line)

    def step(self, compute: Compute, batch: Batch, optimizer: Optimizers | None = None) -> bool:
        """Train on one batch; returns whether that completed an optimizer step.

        Gradients that other losses have left in the parameters do not count.

        Args:
            compute: forward and loss of the batch, or of each micro-batch.
            batch: on the device, as `batches` gives it.
            optimizer: which of several optimizers step, one or a list; None for all together.
                With `accumulate`, each such set gathers its own batches.

        Raises:
            NumbersError: where gradients were not finite; the weights are those before the step. Of
            several ranks the one whose part of the batch is the cause raises it.
            OutOfMemory: where no allowed micro-batch fits.
            ModelError: in the first step, where output and targets differ in shape and broadcast.
            FlatoutError: `prepare` was not given this optimizer.
        """
        stepper = self.stepper
        turn = stepper.joint if optimizer is None else stepper.turn_of(optimizer)
        if not turn.gathered:
            turn.gathered_from = self.feed.taken
        turn.gathered.append(batch)
        return len(turn.gathered) >= self.accumulate and self._flush(compute, turn)

    def flush(self, compute: Compute, optimizer: Optimizers | None = None) -> bool:
        """Make an optimizer step of the batches gathered so far, as at the end of an epoch."""
        return self._flush(compute, self.stepper.turn_of(optimizer))

    def _flush(self, compute: Compute, turn: Turn) -> bool:
        if not turn.gathered:
            return False
        batches = tuple(turn.gathered)
        turn.gathered.clear()
        self._step(compute, batches, turn)
        return True

    def _latest(self, batches: int) -> Step:
        """The step that was just made, of so many batches, and is not counted yet."""
        rate = self._rate_of(self.stepper.turn)
        return Step(self.step_count + 1, self.epoch, self.feed.taken - batches, batches, rate)

    def _step(self, compute: Compute, batches: tuple[Batch, ...], turn: Turn) -> None:
        start, fetch, copy, others = self.feed.lanes()
        # A Trainer's loss is looked at where its outputs and targets are known.
        looks = self.told is None and not turn.has_stepped
        try:
            run = watched(compute) if looks else compute
            if self._other_job is not None and self._other_job.is_due:
                self.stepper.switch.gather_rows()
                self._other_job.decide(compute, batches[0])
            number, tuner = self.step_count + 1, self.tuner
            with self._seen(batches):
                if tuner is None or number < tuner.next_step:
                    done = self.stepper(run, batches, number, turn)
                else:
                    make = partial(self.stepper, run, batches, number, turn)
                    done = tuner.step(make, batches, turn, number, copy / 1e9)
        except (IndexError, RuntimeError, ValueError) as error:
            explain_one_sample(error, batches, self.step_count + 1)
            with self.stepper.switch.rows_as_they_lie():
                explain_ids(error, self.model, batches, compute, self.feed.source)
            raise
        stepped = clock()
        frozen = 0 if self.feed.features is None else self.feed.features.rows.taken()
        turn.has_stepped = True
        self._guard.after_step(turn, compute, batches, self.feed.source)
        self.count_step()
        if self.stepper.switch.leave_read_whole():
            self._tell_of_tables([])
        turn.tally.add(done.loss, done.weight)
        now = clock()
        self.timeline.record(
            start,
            fetch,
            copy,
            done.forward + frozen,
            done.backward,
            done.sync + others,
            done.optimizer,
            now - stepped,
            sum([_on_all_ranks(batch, self.world.size) for batch in batches]),
        )
        if self._live is not None and now >= self._live.due:
            self._live.write()
        self.pace.mark()

    def count_step(self) -> None:
        """A step was made, of all batches taken up to now."""
        self.step_count += 1
        self.step_in_epoch += 1
        self.batch_in_epoch = self.feed.taken

    def record(
        self, lanes: tuple[int, int, int, int], forward: int, stepped: int, samples: int
    ) -> None:
        """Note where the time of a captured step went.

        Args:
            lanes: of its batch.
            forward: how long it took, in ns.
            stepped: when it had ended.
            samples: on how many.
        """
        start, fetch, copy, others = lanes
        now = clock()
        self.timeline.record(start, fetch, copy, forward, 0, others, 0, now - stepped, samples)
        if self._live is not None and now >= self._live.due:
            self._live.write()

    def explain_bad(self, turn: Turn, compute: Compute, batch: Batch) -> None:
        """Look for the cause of a step that was held back.

        Raises:
            NumbersError: naming it.
        """
        self._guard.after_step(turn, compute, (batch,), self.feed.source)

    def _seen(self, batches: tuple[Batch, ...]) -> AbstractContextManager[Any]:
        features = self.feed.features
        return nullcontext() if features is None else features.seen(batches)

    def mean_loss(self, optimizer: Optimizers | None = None) -> float:
        """Weighted mean loss of this epoch so far; waits for the device.

        Args:
            optimizer: of the steps of this one, or of these together; None for all steps.
        """
        stepper = self.stepper
        turns = stepper.turns.values() if optimizer is None else [stepper.turn_of(optimizer)]
        return mean_of([turn.tally.state_dict() for turn in turns])

    @property
    def learning_rate(self) -> float:
        """Of the first parameter group in the next step: what a rule makes of the optimizer's."""
        return self._rate_of(self.stepper.joint)

    def _rate_of(self, turn: Turn) -> float:
        scale = self.stepper.lr_scale
        factor = 1.0 if scale is None else scale.at(self.step_count)
        return float(turn.optimizers[0].param_groups[0]["lr"]) * factor

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that a step's forward runs at, for an evaluation of one's own."""
        if self.tuner is not None:
            self.tuner.back()
        return nullcontext() if self._stepper is None else self._stepper.switch.autocast()

    def notes(self) -> list[str]:
        """What happened since the last call that the user should know."""
        notes, self.stepper.notes = self.stepper.notes, []
        return [*notes, *self.feed.notes()]

    def check_numbers(self, compute: Compute | None = None) -> None:
        """Read the flags of steps that are still unread; call it before evaluating or saving.

        Args:
            compute: makes a bad step once more to find its cause; that of the step by default.

        Raises:
            NumbersError: naming the first step that was bad.
        """
        self._guard.check(self.feed.source, compute)

    # -- checkpoints -------------------------------------------------------------------------

    @cached_property
    def checkpointing(self) -> Checkpointing:
        """Writes checkpoints into `run`.

        Raises:
            CheckpointError: if the Loop has no `run` folder.
        """
        if self.run is None:
            raise no_run_folder()
        asked = self.requested.save
        if self.lays_out:  # the copy that another thread writes would be of all weights
            asked = asked.model_copy(update={"asynchronous": False})
        return Checkpointing(self.run, self.world, asked)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in `run`.

        Raises:
            CheckpointError: if the Loop has no `run` folder.
        """
        return self.checkpointing.checkpoints

    def weights(self, *, kept: bool = True) -> dict[str, torch.Tensor]:
        """Everything that is saved of the model, by name, whole; all ranks call it.

        Args:
            kept: whether this rank wants them; where not, tensors may be empty.
        """
        return self.stepper.strategy.weights(self.model, kept=kept)

    def save(self, extra: Any = None, score: float | None = None, own: Any = None) -> str:
        """Write a checkpoint of everything; returns its path. Resuming from it is bitwise.

        Args:
            extra: more state of the caller: numbers, strings, lists, dicts, tensors. Of several
                ranks that of the first is kept.
            score: the checkpoint with the smallest is kept beside the newest.
            own: the like, of which that of each rank is kept.

        Raises:
            NumbersError: if a weight or buffer is not finite.
            CheckpointError: if it, or the one before it, could not be written, or if batches that
                wait for others to make a step would be lost in a resume.
        """
        assert self.resolved is not None
        check_gathered(self.stepper.turns.values(), self.step_count, self.batch_in_epoch)
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
            metadata=self.metadata,
        )
        self._saved = (self.epoch, self.step_count)
        return path

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint is of this very place in training."""
        return self._saved == (self.epoch, self.step_count)

    def next_checkpoint(self) -> str:
        """The path that `save` would return now.

        Raises:
            CheckpointError: if the Loop has no `run` folder.
        """
        return self.checkpointing.next_path(self.step_count)

    def end_tuning(self) -> None:
        """Training is over: what is not tried by now will not be."""
        if self.tuner is not None and sys.exc_info()[0] is None:
            self.tuner.stop("the run ended")

    @property
    def tuning(self) -> dict[str, Any] | None:
        """What was tried on which steps, as plain data; None where nothing was."""
        return None if self.tuner is None else self.tuner.record(self.step_count)

    def close(self) -> None:
        """Take code changes off the model, put torch's settings back, and end the saving.

        Raises:
            CheckpointError: if the last checkpoint could not be written.
        """
        self.end_tuning()
        if sys.exc_info()[0] is None:  # else other ranks may not come
            if self._stepper is not None:
                self._stepper.switch.gather_rows()
            if self._trial is not None:
                self._trial.end()
        self.evaluate_graph.close()
        self.timeline.stop()
        if self._live is not None:
            self._live.close()
            self._live = None
        self.undo.close()
        if "checkpointing" in vars(self):
            self.checkpointing.close()


def _listed(given: Any) -> tuple[Any, ...]:
    """Nothing, one, or a list or tuple of several."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _on_all_ranks(batch: Batch, ranks: int) -> int:
    """Samples of the batch that this one is a part of; about, where ranks have samples of own."""
    return batch.samples if ranks == 1 else batch.whole or batch.samples * ranks
