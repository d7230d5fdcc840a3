"""The state of a Loop: its job, settings and ranks, and the progress of training.

`Loop.prepare` and its steps are functions of this state in other files of this folder. They import
this state, and the Loop imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.console import say
from flatout.data import Batch, Source
from flatout.devices import Placement
from flatout.errors import FlatoutError
from flatout.measure import Timeline, fingerprint
from flatout.optim import LrRule
from flatout.recipe import (
    GivenRecipe,
    Parity,
    Recipe,
    ResolvedRecipe,
    as_recipe,
    effective,
    from_file,
)
from flatout.save import Checkpoints, LoadedCheckpoint
from flatout.train.checkpointing import Checkpointing, no_run_folder
from flatout.train.evaluate_batch import EvaluateBatch
from flatout.train.feed import Feed
from flatout.train.graphs.evaluate_graph import EvaluateGraph
from flatout.train.graphs.graphs import graphs_of
from flatout.train.large_batch import as_rule
from flatout.train.loop_values import (
    Asked,
    Checkpoint,
    Evaluation,
    FirstBatches,
    Identity,
    Placed,
    Progress,
    TrainerValues,
)
from flatout.train.micro_batch import InPieces
from flatout.train.part import Part, check_parts
from flatout.train.rank_device import join_on
from flatout.train.rank_trial import is_trial
from flatout.train.settings import Settings, Switch
from flatout.train.step import Stepper
from flatout.train.terms import TERMS
from flatout.train.tuning.tuner import Tuner
from flatout.train.turn import Turn
from flatout.world import ONE, World, restarts, share_cpus

# Skipped fp16 steps are reported if they exceed both limits. _FEW: number of skipped steps.
# _SHARE_SKIPPED: skipped steps as a fraction of all steps.
_FEW = 3
_SHARE_SKIPPED = 0.01
Scheduler = Any  # torch's schedulers share no base class that covers ReduceLROnPlateau


class LoopState:
    """The state of a Loop, and the values that its ranks exchange.

    Attributes:
        terms: the clocks and limits of `auto`; set before `prepare`.
        run: folder or URL for checkpoints and logs; None writes nothing.
        resolved: settings of the steps; None before `prepare`.
        feed: yields the batches.
        resume: the checkpoint that this Loop has resumed from; None where there was none.
        undo: callbacks that `close` runs; they receive whether training has failed.
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
        self.terms = TERMS
        self.run = None if run is None or is_trial() else str(run).rstrip("/")
        requested, words = _requested_here(recipe)
        self.asked = Asked(
            requested,
            words,
            allow=Parity.from_name(allow),
            seed=seed,
            accumulate=accumulate,
            clip=(clip_norm, clip_value),
            lr_rule=as_rule(lr_rule),
            parts=check_parts(parts),
            # After a rank was killed all ranks start again, and resume from the last checkpoint.
            resume=not is_trial() and (resume or (run is not None and restarts() > 0)),
        )
        self.progress = Progress()
        self.first_batches = FirstBatches()
        self.identity = Identity()
        self.trainer = TrainerValues()
        self.timeline = Timeline()
        self.feed = Feed()
        self.resolved: ResolvedRecipe | None = None
        self.resume: Checkpoint | None = None
        self.placed: Placed
        self.model: nn.Module
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.schedulers: tuple[Scheduler, ...] = ()
        self.undo = ExitStack()
        self._stepper: Stepper | None = None

    @cached_property
    def world(self) -> World:
        """The ranks that train together; the first access joins them.

        After that access only the first rank prints messages.
        """
        world = join_on(self.asked.recipe.world)
        if not world.is_first:
            self.say = lambda line: None
        if world.shares_gpus:
            self.say(
                "ranks share a GPU, which NCCL does not support: they add up gradients by "
                "gloo on the CPU"
            )
        if world.device == "cpu":
            share_cpus(world, self.asked.recipe.process)
        return world

    @property
    def stepper(self) -> Stepper:
        """Object that makes the steps."""
        if self._stepper is None:
            raise FlatoutError("the Loop has no model yet", do="call loop.prepare(...) first")
        return self._stepper

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self.progress.epoch

    @property
    def step_count(self) -> int:
        """Number of optimizer steps since training began; a resume continues the count."""
        return self.progress.step_count

    @property
    def placement(self) -> Placement:
        """The device of each module, after `prepare`."""
        return self.placed.placement

    @property
    def restored_extra(self) -> Any:
        """After a resume, the `extra` argument of the `save` that wrote the checkpoint."""
        return None if self.resume is None else self.resume.extra

    @property
    def tuner(self) -> Tuner | None:
        """The Part that tries settings on the steps; None where all settings are decided."""
        return None if self._stepper is None else self._stepper.chain.find(Tuner)

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self.feed.device

    @property
    def together(self) -> World:
        """The ranks that run the same code now: all ranks within a step, else this rank alone."""
        return ONE if self._stepper is None else self._stepper.together

    @property
    def asked_strategy(self) -> str:
        """Requested strategy for the ranks; "" with one rank."""
        return self.asked.recipe.world.strategy if self.world.size > 1 else ""

    @property
    def lays_out(self) -> bool:
        """Whether the strategy shards the model, so that each rank holds only a part of it."""
        return self.asked_strategy in ("fsdp", "staged")

    @property
    def is_staged(self) -> bool:
        """Whether the strategy gives each rank only some of the layers (pipeline stages)."""
        return self.asked_strategy == "staged"

    @property
    def has_servers(self) -> bool:
        """Whether other ranks update some of this rank's weights."""
        return self.asked_strategy == "parameter_server"

    @property
    def takes_whole_batches(self) -> bool:
        """Whether every rank gets each whole batch, because all ranks compute it together."""
        return self._stepper is not None and self._stepper.strategy.takes_whole_batches

    @property
    def meets_in_compute(self) -> bool:
        """Whether ranks wait for each other within the model's forward."""
        return self._stepper is not None and self._stepper.strategy.meets_in_compute

    def meet_others(self) -> None:
        """Synchronize ranks that step alone or hold parts of tables; all ranks call it."""
        if self._stepper is not None:
            self._stepper.meet_others()

    def settings_of(self, model: nn.Module) -> Settings:
        """Return a model's settings: those decided, or before the decision its present settings."""
        if self._stepper is None:
            return Switch(model, (), self.device).now
        return self._stepper.switch.now

    def is_tuning(self) -> bool:
        """Return whether settings are still being tried."""
        return self.progress.is_other_job or (self.tuner is not None and self.tuner.is_searching)

    def _may_compile(self) -> bool:
        if self.is_tuning() or self.evaluation.batch_size.is_measuring:
            return False
        compiled = None if self._stepper is None else graphs_of(self._stepper).compiled
        return compiled is None or compiled.compiling is None

    @property
    def tuning(self) -> dict[str, Any] | None:
        """Trials of settings and their steps, as plain data; None where no tuner ran."""
        return None if self.tuner is None else self.tuner.record(self.step_count)

    @property
    def evaluated(self) -> dict[str, Any] | None:
        """Measurements of evaluations, as plain data; None without any."""
        result = {
            "sizes": self.evaluation.batch_size.trials,
            "graphs": self.evaluation.graph.records(),
        }
        return result if any(result.values()) else None

    def ready(self, batch: Batch) -> Batch:
        """Move the batch to the device, in the chosen memory format."""
        return self.feed.ready(batch)

    def tell(self, line: str) -> None:
        """Note a line if there is a History, else print it."""
        (self.say if self._stepper is None else self.note)(line)

    def note(self, line: str) -> None:
        """Print a line, and keep it in the first rank's History."""
        if not self.trainer.shows_notes:
            self.say(line)
        if self.world.is_first:
            self.stepper.notes.append(line)

    @property
    def skipped_steps(self) -> int:
        """The number of steps since `prepare` that overflowed in fp16. Waits for the device."""
        return sum(turn.update.skipped for turn in self.stepper.turns)

    def tell_overflows(self) -> None:
        """Report once that fp16 leaves out more steps than it needs to find its loss scale."""
        skipped, made = self.skipped_steps, self.step_count - self.progress.first_step
        if not self.progress.reported_overflows and skipped > max(_FEW, made * _SHARE_SKIPPED):
            self.progress.reported_overflows = True
            self.note(
                f"fp16 has left out {skipped:,} of {made:,} steps, because gradients overflowed: "
                "precision bf16 needs no loss scale; if gradients grow, lower the learning rate or "
                "set clip_norm"
            )

    def tell_skipped(self, source: Source) -> None:
        """Report the rows of a source that ranks have newly skipped; all ranks call it."""
        for line in self.feed.skipped(source, self.world):
            self.tell(line)

    @property
    def next_step(self) -> int:
        """Number, from 1, of the step that is made of the batches taken up to now.

        Where ranks claim parts of batches, all parts of one step have the same number. A rank may
        make several of these parts, or none.
        """
        if self.feed.claims is None:
            return self.step_count + 1
        return (
            self.step_count
            - self.progress.step_in_epoch
            - (-self.feed.taken // self.asked.accumulate)
        )

    def count_step(self) -> None:
        """Count the step that was made of all batches taken up to now."""
        passed = self.next_step - self.step_count
        self.progress.step_count += passed
        self.progress.step_in_epoch += passed
        self.progress.batch_in_epoch = self.feed.taken

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group in the next step, scaled by the rule."""
        return self._rate_of(self.stepper.joint)

    def _rate_of(self, turn: Turn) -> float:
        scale = self.stepper.lr_scale
        factor = 1.0 if scale is None else scale.at(self.step_count)
        return float(turn.optimizers[0].param_groups[0]["lr"]) * factor

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of a step's forward, for a user's own evaluation."""
        if self.tuner is not None:
            self.tuner.back()
        if self._stepper is None:
            torch.clear_autocast_cache()  # an open autocast may hold earlier weights
            return nullcontext()
        return self._stepper.switch.autocast()

    @cached_property
    def evaluation(self) -> Evaluation:
        """The objects that run evaluations."""
        return Evaluation(
            InPieces(lambda line: self.say(line)),
            EvaluateBatch(self.tell, worth_s=self.terms.worth_s),
            EvaluateGraph(self.tell, self._may_compile),
        )

    @cached_property
    def checkpointing(self) -> Checkpointing:
        """Writes checkpoints into `run`."""
        if self.run is None:
            raise no_run_folder()
        asked = self.asked.recipe.save
        if self.lays_out:  # a thread that writes would need a copy of all weights
            asked = asked.model_copy(update={"asynchronous": False})
        return Checkpointing(self.run, self.world, asked)

    @cached_property
    def resume_checkpoint(self) -> LoadedCheckpoint | None:
        """The checkpoint that `prepare` resumes from; None where there is none."""
        if self.asked.resume or self.run is not None:
            return self.checkpointing.find(self.asked.resume)
        return None

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in `run`."""
        return self.checkpointing.checkpoints

    def weights(self, *, kept: bool = True) -> dict[str, torch.Tensor]:
        """Return all saved tensors of the model by name, unsharded; all ranks call it."""
        return self.stepper.strategy.weights(self.model, kept=kept)

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint was written at the present epoch and step."""
        return self.progress.saved == (self.epoch, self.step_count)

    def next_checkpoint(self) -> str:
        """Return the path that `save` would return now."""
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
    words.append(
        f"the Recipe is from another machine ({'; '.join(differences)}): settings are decided again"
    )
    return recipe.for_other_machine()
