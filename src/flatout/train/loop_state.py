"""What a Loop knows: of the job, its settings and its ranks, and how far training has come.

`Loop.prepare` and its steps are functions of this state in files beside this one; they import it,
and the Loop imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from flatout.console import say
from flatout.data import Batch, Source
from flatout.devices import Placement
from flatout.errors import FlatoutError
from flatout.measure import Timeline, fingerprint
from flatout.optim import LrRule, LrScale
from flatout.recipe import (
    Choice,
    GivenRecipe,
    ModelFacts,
    Parity,
    Recipe,
    ResolvedRecipe,
    as_recipe,
    effective,
    from_file,
)
from flatout.save import Checkpoints, LoadedCheckpoint
from flatout.train.auto_terms import TERMS
from flatout.train.checkpointing import Checkpointing, no_run_folder
from flatout.train.evaluate_batch import EvaluateBatch
from flatout.train.evaluate_graph import EvaluateGraph
from flatout.train.feed import Feed
from flatout.train.graphs import Graphs
from flatout.train.large_batch import as_rule
from flatout.train.micro_batch import Parts
from flatout.train.part import Part, check_parts
from flatout.train.rank_device import join_on
from flatout.train.rank_trial import is_trial
from flatout.train.settings import Settings, Switch
from flatout.train.step import Stepper
from flatout.train.stragglers import Pace
from flatout.train.tuner import Tuner
from flatout.train.turn import Turn
from flatout.world import ONE, World, restarts, share_cpus

# A line reports overflows in fp16 beyond the larger of this number and this share of steps.
_FEW = 3
_SHARE_SKIPPED = 0.01
Scheduler = Any  # torch's schedulers share no base class that covers ReduceLROnPlateau


class Resumed(Protocol):
    """A checkpoint that a Loop goes on from; resume.py says what these are."""

    def choices(self, requested: Recipe) -> tuple[dict[str, Choice], Mapping[str, Any]] | None:
        """What was decided then."""

    def check_data(self, source: Source, first: list[int] | None) -> None:
        """Raise if the data differ from the checkpoint's."""


class LoopState:
    """The state of a Loop, and the values that its ranks exchange.

    Attributes:
        terms: the clocks and limits of `auto`; set before `prepare`.
        epoch: number of the current epoch, from 0.
        step_count: optimizer steps done since training began (a resume goes on counting).
        step_in_epoch: optimizer steps done in this epoch.
        batch_in_epoch: batches of this epoch that were taken up to the last step.
        resolved: how the steps run; None before `prepare`.
        lr_scale: what the learning-rate rule does, after `prepare`; None without a rule.
        in_pieces: runs a batch of an evaluation, in pieces where memory runs out.
        parts: the user's own Parts.
        evaluate_graph: runs an evaluation's forward as one compiled graph.
        batch_s: about the seconds in which a batch is made, after `prepare`.
        pace: of several ranks, what this one's steps take without waiting for others.
        planned_epochs: of the whole run, where that is known.
        shows_notes: whether a progress line says what is noted.
        tuner: tries settings on the steps; None where nothing was left open.
        facts: of the model, after `prepare`.
        restored_extra: after a resume, what was given to `save` as `extra`.
        restored_own: after a resume, what the ranks then gave to `save` as `own`, by rank.
        trainer_facts: what a Trainer knows of its job, for a resume to compare; else None.
        job: all that identifies this job, as a checkpoint keeps it.
        data_state: what identifies the data, where `prepare` was given them and a run folder.
        fresh_groups: the optimizers' groups as `prepare` found them.
        feed: gives the batches.
        metadata: text that goes with the weights into checkpoints; as a Trainer sets it.
        ids: rows of ids, for checkpoints; as a Trainer sets it.
        resume: the checkpoint that this Loop went on from; None where there was none.
        uncounted: within, metrics do not count batches; as a Trainer sets it.
        is_other_job: whether other parameters train than those that settings were decided for.
        job_changes: how many times other parameters began to train, or no longer did.
        undo: what `close` puts back; it is told whether training has failed.
        why_device: why this rank computes on its device.
        largest_batch: how a Trainer has decided how large batches are, as plain data; else None.
        has_own_batches: whether each rank reads batches of its own, which are not cut.
    """

    def __init__(
        self,
        recipe: GivenRecipe | None = None,
        *,
        allow: str = "tolerant",
        seed: int = 0,
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        lr_rule: LrRule | None = None,
        parts: Sequence[Part] = (),
        run: str | Path | None = None,
        resume: bool | str = False,
        say: Callable[[str], None] = say,
    ) -> None:
        if accumulate < 1:
            raise FlatoutError(f"accumulate must be at least 1, found {accumulate}")
        self.say = say
        self.parts = check_parts(parts)
        self.terms = TERMS
        self.why_device = ""
        self.largest_batch: dict[str, Any] | None = None
        self.requested, self._first_words = _requested_here(recipe)
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
        self.batch_s = 0.0
        self.has_own_batches = False
        self.placement: Placement
        self.lr_scale: LrScale | None = None
        self.planned_epochs: int | None = None
        self.shows_notes = False
        self.tuner: Tuner | None = None
        self.facts = ModelFacts()
        self.uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
        self.is_other_job = False
        self.job_changes = 0
        self.restored_extra: Any = None
        self.restored_own: list[Any] = []
        self.clip = (clip_norm, clip_value)
        self.trainer_facts: dict[str, list[str]] | None = None
        self.job: dict[str, Any] = {}
        self.model: nn.Module
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.schedulers: tuple[Scheduler, ...] = ()
        self.data_state: dict[str, Any] | None = None
        self.fresh_groups: list[list[dict[str, Any]]] = []
        self.metadata: dict[str, str] = {}
        self.ids: dict[str, Any] | None = None
        self.lr_rule = as_rule(lr_rule)
        # After a rank was killed all start again, and go on where the last checkpoint was.
        self._resume = not is_trial() and (resume or (run is not None and restarts() > 0))
        self.resume: Resumed | None = None
        self._saved: tuple[int, int] | None = None
        self._first_step = 0  # steps that an earlier process has made
        self._tells_overflows = True
        self.undo = ExitStack()
        self._stepper: Stepper | None = None
        self.pace = Pace(ONE.collectives)
        self.in_pieces = Parts(lambda line: self.say(line))
        self.tables_reported = ""
        self.evaluate_graph = EvaluateGraph(self.tell, self._may_compile)

    @cached_property
    def world(self) -> World:
        """The ranks that train together; asked for the first time, they meet.

        From then on the first speaks for all.
        """
        world = join_on(self.requested.world)
        if not world.is_first:
            self.say = lambda line: None
        if world.shares_gpus:
            self.say(
                "ranks share a GPU, which NCCL refuses: they add up through gloo, by way of the CPU"
            )
        if world.device == "cpu":
            share_cpus(world, self.requested.process)
        return world

    @property
    def stepper(self) -> Stepper:
        """Makes the steps."""
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

    @property
    def asked_strategy(self) -> str:
        """How the job is to be laid over its ranks; "" of one rank, which has no others."""
        return self.requested.world.strategy if self.world.size > 1 else ""

    @property
    def lays_out(self) -> bool:
        """Whether each rank is to hold a part of the model alone."""
        return self.asked_strategy in ("fsdp", "staged")

    @property
    def is_staged(self) -> bool:
        """Whether each rank is to hold some of the layers."""
        return self.asked_strategy == "staged"

    @property
    def has_servers(self) -> bool:
        """Whether other ranks step weights of this one."""
        return self.asked_strategy == "parameter_server"

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

    def is_tuning(self) -> bool:
        """Whether settings are still being tried."""
        return self.is_other_job or (self.tuner is not None and self.tuner.is_searching)

    def _may_compile(self) -> bool:
        graphs = None if self._stepper is None else self._stepper.chain.find(Graphs)
        if self.is_tuning() or self.evaluate_batch.is_measuring:
            return False
        return graphs is None or graphs.compiled is None or graphs.compiled.compiling is None

    @property
    def tuning(self) -> dict[str, Any] | None:
        """What was tried on which steps, as plain data; None where nothing was."""
        return None if self.tuner is None else self.tuner.record(self.step_count)

    @property
    def evaluated(self) -> dict[str, Any] | None:
        """How evaluations ran, as plain data; None where nothing was measured of them."""
        result = {"sizes": self.evaluate_batch.trials, "graphs": self.evaluate_graph.records()}
        return result if any(result.values()) else None

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

    @property
    def skipped_steps(self) -> int:
        """The number of steps since `prepare` that overflowed in fp16. Waits for the device."""
        return sum(turn.update.skipped for turn in self.stepper.turns)

    def tell_overflows(self) -> None:
        """Report once that fp16 leaves out more steps than it needs to find its loss scale."""
        skipped, made = self.skipped_steps, self.step_count - self._first_step
        if self._tells_overflows and skipped > max(_FEW, made * _SHARE_SKIPPED):
            self._tells_overflows = False
            self.note(
                f"fp16 has left out {skipped:,} of {made:,} steps, because gradients overflowed: "
                "precision bf16 needs no loss scale; if gradients grow, lower the learning rate or "
                "set clip_norm"
            )

    def tell_skipped(self, source: Source) -> None:
        """Say which rows of a source any rank has skipped, and not said yet; all ranks call it."""
        for line in self.feed.skipped(source, self.world):
            self.tell(line)

    @property
    def next_step(self) -> int:
        """The number of the step that is to be made of the batches taken up to now, from 1.

        Where ranks claim parts of batches, those of one step have one number: a rank may make
        several of them, or none.
        """
        if self.feed.claims is None:
            return self.step_count + 1
        return self.step_count - self.step_in_epoch - (-self.feed.taken // self.accumulate)

    def count_step(self) -> None:
        """A step was made, of all batches taken up to now."""
        passed = self.next_step - self.step_count
        self.step_count += passed
        self.step_in_epoch += passed
        self.batch_in_epoch = self.feed.taken

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
        if self._stepper is None:
            torch.clear_autocast_cache()  # an open autocast may hold earlier weights
            return nullcontext()
        return self._stepper.switch.autocast()

    @cached_property
    def evaluate_batch(self) -> EvaluateBatch:
        """The object that chooses the batch size of evaluations."""
        return EvaluateBatch(self.tell, worth_s=self.terms.worth_s)

    @cached_property
    def checkpointing(self) -> Checkpointing:
        """Writes checkpoints into `run`."""
        if self.run is None:
            raise no_run_folder()
        asked = self.requested.save
        if self.lays_out:  # the copy that another thread writes would be of all weights
            asked = asked.model_copy(update={"asynchronous": False})
        return Checkpointing(self.run, self.world, asked)

    @cached_property
    def resume_checkpoint(self) -> LoadedCheckpoint | None:
        """The checkpoint that `prepare` goes on from; None where there is none."""
        if self._resume or self.run is not None:
            return self.checkpointing.find(self._resume)
        return None

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in `run`."""
        return self.checkpointing.checkpoints

    def weights(self, *, kept: bool = True) -> dict[str, torch.Tensor]:
        """Everything that is saved of the model, by name, whole; all ranks call it."""
        return self.stepper.strategy.weights(self.model, kept=kept)

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint is of this very place in training."""
        return self._saved == (self.epoch, self.step_count)

    def next_checkpoint(self) -> str:
        """The path that `save` would return now."""
        return self.checkpointing.next_path(self.step_count)


def _requested_here(recipe: GivenRecipe | None) -> tuple[Recipe, list[str]]:
    words: list[str] = []
    given, file = (_for_here(item, words) for item in (as_recipe(recipe), from_file()))
    return effective(given, file=file), words


def _for_here(recipe: Recipe | ResolvedRecipe | None, words: list[str]) -> Recipe | None:
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    same, differences = recipe.on_this_machine(fingerprint().as_dict())
    if same:
        return recipe.request()
    words.append(f"the Recipe is from another machine ({'; '.join(differences)}): decided again")
    return recipe.for_other_machine()
