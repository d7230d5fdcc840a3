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
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from flatout.console import say
from flatout.data.batch import Batch, split, to, to_memory_format
from flatout.data.execution.prefetch import prefetch
from flatout.data.own_pipes import is_pipe
from flatout.data.pipeline import Pipeline
from flatout.data.ranked import ranked
from flatout.data.source import Source, found_of
from flatout.devices import PingPong, find_ping_pong, place, process, resolve_device
from flatout.errors import CheckpointError, DeviceError, FlatoutError, ModelError, NumbersError
from flatout.measure import Timeline, fingerprint
from flatout.measure.live import Live
from flatout.models import facts_of, weights_of
from flatout.optim import LrRule, LrScale, Optimizers, as_tuple
from flatout.recipe import (
    ASKED,
    PLAIN,
    Choice,
    ModelFacts,
    Parity,
    Recipe,
    ResolvedRecipe,
    dumps,
    effective,
    from_file,
    loads,
    of_change,
)
from flatout.save.checkpoint import Checkpoints, LoadedCheckpoint
from flatout.save.in_use import InUse
from flatout.save.pieces import Pieces, check_shared
from flatout.save.storage import Folder
from flatout.strategies import check_replicas
from flatout.strategies.reductions import Reduction, Shared, check_reduction, reduction_of
from flatout.train import auto, guard
from flatout.train.changed_rates import RateChanges
from flatout.train.checks import check_first_batch
from flatout.train.inputs import Inputs
from flatout.train.large_batch import as_rule, resumed_words, scale_rates
from flatout.train.micro_batch import Parts, estimate_pieces, pieces_for
from flatout.train.preflight import check_last_batch, one_sample
from flatout.train.rank_trial import RankTrial, is_trial
from flatout.train.ranks import agreed, check_ranks, part_of
from flatout.train.resume import (
    check_same_data,
    first_samples,
    own_state_of,
    put_back,
    source_state,
    state_of,
)
from flatout.train.running_mean import mean_of
from flatout.train.same_job import check_same_job, in_words, job_of
from flatout.train.sample_dropout import sample_dropout
from flatout.train.settings import Settings, Switch
from flatout.train.snapshot import set_random_state, untouched
from flatout.train.step import Compute, Stepper, placed
from flatout.train.stragglers import Pace
from flatout.train.tables import outside
from flatout.train.turn import Turn
from flatout.world import ONE, LostRank, World, join, restarts
from flatout.world import place as place_here
from flatout.world.cpus import share_cpus

# After an error, how long the first rank waits for the other ranks' parts of a checkpoint.
_LAST_PIECES_S = 5.0

Scheduler = Any  # torch's schedulers share no base class that covers ReduceLROnPlateau


# What prepare was given and gives back: one optimizer, or several.
_Given = TypeVar("_Given", bound=Optimizers)


class _Flag(NamedTuple):
    """The numbers guard's flag of a step, on the device and not read yet."""

    step: int
    epoch: int
    first_batch: int
    batches: int
    rate: float
    bad: torch.Tensor
    compute: Compute


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
        pace: of several ranks, what this one's steps take without waiting for others.
        planned_epochs: of the whole run, where that is known.
        shows_notes: whether a progress line says what is noted.
        measuring_s: seconds that `prepare` took to decide open settings.
        restored_extra: after a resume, what was given to `save` as `extra`.
        restored_own: after a resume, what the ranks then gave to `save` as `own`, by rank.
        told: what a Trainer tells of its job, for a resume to compare; None without a Trainer.
        job: all that tells this job from others, as a checkpoint keeps it.
        fresh_groups: the optimizers' groups as `prepare` found them.
        inputs: what becomes of a batch's images on the device; as a Trainer sets it.
        metadata: text that goes with the weights into checkpoints; as a Trainer sets it.
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
        self._first_words: list[str] = []
        self._elsewhere: list[str] = []
        self._why_device = ""
        self.requested = self._effective(recipe)
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
        self.source: Source | None = None
        self.first_samples: list[int] | None = None
        self.first_batch_size: int | None = None
        self.lr_scale: LrScale | None = None
        self.planned_epochs: int | None = None
        self.shows_notes = False
        self.measuring_s = 0.0
        self.restored_extra: Any = None
        self.restored_own: list[Any] = []
        self.clip = (clip_norm, clip_value)
        self.told: dict[str, list[str]] | None = None
        self.job: dict[str, Any] = {}
        self.fresh_groups: list[list[dict[str, Any]]] = []
        self._changes = RateChanges()
        self.inputs = Inputs()
        self.metadata: dict[str, str] = {}
        self.lr_rule = as_rule(lr_rule)
        # After a rank was killed all start again, and go on where the last checkpoint was.
        self._resume = not is_trial() and (resume or (run is not None and restarts() > 0))
        self._resumed: LoadedCheckpoint | None = None
        self._kept: ResolvedRecipe | None = None
        self._taken = 0
        self._flags: list[_Flag] = []
        self._lanes: tuple[int, int, int, int] | None = None
        self._checkpoints: Checkpoints | None = None
        self._saved: tuple[int, int] | None = None
        self._undo = ExitStack()
        self._world: World | None = None
        self._trial: RankTrial | None = None
        self._live: Live | None = None
        self._in_use: InUse | None = None
        self.pace = Pace(ONE.collectives)
        self.parts = Parts(lambda line: self.say(line))

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.join()

    @property
    def together(self) -> World:
        """The ranks that run the same code right now: all within a step, else this one alone."""
        return self.stepper.together if hasattr(self, "stepper") else ONE

    def _effective(self, recipe: Recipe | ResolvedRecipe | None) -> Recipe:
        """`--set` over code over `--recipe`; what another machine measured is decided anew."""
        file = from_file()
        return effective(
            None if recipe is None else self._for_here(recipe),
            file=None if file is None else self._for_here(file),
        )

    def _for_here(self, recipe: Recipe | ResolvedRecipe) -> Recipe:
        if isinstance(recipe, Recipe):
            return recipe
        same, differences = recipe.on_this_machine(fingerprint().as_dict())
        if same:
            return recipe.request()
        self._first_words.append(
            f"the Recipe is from another machine ({'; '.join(differences)}): decided anew"
        )
        return recipe.anew()

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
        self.join()
        for line in self._first_words:
            self.say(line)
        self.model, self.optimizers = model, as_tuple(optimizer)
        if not self.optimizers:
            raise ModelError(
                "prepare was given no optimizer", do="give it one, or a list of several"
            )
        self.schedulers = _listed(scheduler)
        if self.requested.process.threads == "auto":
            self._undo.callback(torch.set_num_threads, torch.get_num_threads())
        loaded = self._find_checkpoint()
        self.job = self.world.from_first(job_of(self, compute))
        self.fresh_groups = [[dict(group) for group in o.param_groups] for o in self.optimizers]
        if loaded is not None:
            self._changes = check_same_job(loaded, self, weights_of(model))
            self._take_recipe(loaded)
        self._check_folder()
        for line in process.apply(self.requested.process):
            self.say(line)
        self._place(model)
        if data is not None and is_pipe(data):
            data = agreed(data, self.world)
        if data is not None and self.run is not None:
            # What tells the data is told before a function that draws has drawn.
            source_state(data)
        check_ranks(model, data, self.world)
        check_reduction(self.requested.world, self.world, self.say)
        self.source = whole = data
        if data is not None:
            data = part_of(data, self.world, self._note)
        first = data.peek(2) if compute is not None and data is not None else []
        if first and data is not None:
            # The first rank's part begins with the same samples on any World.
            self.first_samples = first_samples(first) if self.world.is_first else None
            self.first_batch_size = round(sum(self.world.gather(_samples_of(first))))
            if loaded is not None:
                check_same_data(data, loaded.state, self.first_samples)
        ready = [self.inputs(to(batch, self.device)) for batch in first]
        if ready and whole is not None and compute is not None:
            check_last_batch(self.model, compute, ready[0], whole)
        self._decide(compute, ready, steps)
        if loaded is not None:
            self._restore(loaded)
        elif self.world.is_first:
            self.stepper.notes += self._elsewhere  # after a resume the History has them
        self._scale_rates(data)
        check_replicas(model, self.world, "at the start")
        if is_trial():
            self._trial = RankTrial(lambda: self.step_count, self.world.is_first)
        self._live = self._show()
        return model, optimizer

    def _show(self) -> Live:
        """Let `flatout top` see the steps."""
        here = self.world.place
        return Live(
            self.timeline,
            rank=self.world.rank,
            world_size=self.world.size,
            job=None if self.world.size == 1 else f"{here.address}:{here.port}",
            run=self.run,
        )

    def join(self) -> World:
        """Meet the ranks that were started beside this one; from now on the first speaks for all.

        Raises:
            WorldError: they do not come.
        """
        if self._world is not None:
            return self._world
        if place_here().world_size == 1:
            self._world = ONE
            return ONE
        device, asked = self._device_here()[0].type, self.requested.world
        self._world = join(device, asked.timeout, asked.patience)
        if not self._world.is_first:
            self.say = lambda line: None
        if device == "cpu":
            share_cpus(self._world, self.requested.process)
        return self._world

    def _device_here(self) -> tuple[torch.device, str]:
        """The device of this rank, and why: ranks of a node take its GPUs in order."""
        asked, here = self.requested.world, place_here()
        name = asked.device
        if here.local_world_size > 1 and name in ("auto", "cuda"):
            count = torch.cuda.device_count()
            if count >= here.local_world_size:
                name = f"cuda:{here.local_rank}"
            elif count or (name == "cuda" and asked.placement == "strict"):
                raise DeviceError(
                    f"{here.local_world_size} ranks on this node, but {count} GPUs",
                    do="start as many ranks as there are GPUs, or --set world.device=cpu",
                )
        return resolve_device(name, asked.placement == "strict")

    def _place(self, model: nn.Module) -> None:
        asked = self.requested.world
        self.device, self._why_device = self._device_here()
        self.placement = place(model, self.device, strict=asked.placement == "strict")
        self._elsewhere = self.placement.words_of_fallbacks()
        if asked.device not in ("auto", str(self.device), self.device.type):
            self._elsewhere.insert(0, f"running on {self.device} {self._why_device}")
        for line in self._elsewhere:
            self.say(line)
        for optimizer in self.optimizers:
            if self.device.type != "cpu" and optimizer.state:
                # State of earlier steps follows its parameters: torch moves what it loads.
                optimizer.load_state_dict(optimizer.state_dict())

    def _decide(self, compute: Compute | None, first: list[Batch], steps: int | None) -> None:
        """Resolve the Recipe on the first batches and switch to it; `close` switches back."""
        keyed, facts = sample_dropout(
            self.requested,
            self.model,
            self.seed,
            compute,
            first,
            facts_of(self.model, str(self.device)),
            self.world,
            self.say,
        )
        if keyed is not None:
            self._undo.callback(keyed.close)
        self.stepper = Stepper(
            Switch(self.model, self.optimizers, self.device),
            clip_norm=self.clip[0],
            clip_value=self.clip[1],
            micro_batch=self.requested.memory.micro_batch,
            dropout=keyed,
        )
        self._note_undo()
        if self.world.size > 1:
            self.stepper.meet(self.world)
        if self.requested.compute.deterministic:
            torch.use_deterministic_algorithms(True)
        if first and compute is not None:
            estimated = self._estimate_pieces(compute, first[0])
            check = partial(check_first_batch, self.model, compute, source=self.source)
            self.stepper.look(first[0], check)
            self._warn_of_trips(compute, first[0])
        if self._kept is not None:
            choices = {
                field: choice
                for field, choice in self._kept.choices.items()
                if self.requested.get(field) in (choice.value, "auto")
            }
            self.resolved = self.requested.resolve(choices, self._kept.machine, facts)
        else:
            began = clock()
            self.resolved = auto.resolve(
                self.requested, self.stepper, compute, first, facts, self.allow, steps, self.say
            )
            self.measuring_s = (clock() - began) / 1e9
        self._note_device(facts)
        if self.world.size > 1:
            # Each rank has measured, all at the same time; what the first found holds for all.
            found = loads(self.world.from_first(dumps(self.resolved)))
            assert isinstance(found, ResolvedRecipe)
            self.resolved = found
            self.pace = Pace(self.world.collectives)
            samples = sum(self.world.gather(_samples_of(first)))
            self.stepper.train_with(self.world, samples, self._reduction())
        self.stepper.use(Settings.of(self.resolved))
        self._reads_are_free = self.device.type == "cpu"
        self._channels_last = self.resolved.compute.memory_format == "channels_last"
        if first and compute is not None and estimated > 1:
            if self.stepper.pieces == estimated:  # the settings chosen may need less
                self._estimate_pieces(compute, first[0])
            self._tell_of_pieces(first[0])

    def _note_device(self, facts: ModelFacts) -> None:
        """Say in the Recipe on which device the job runs, where another one was asked for."""
        assert self.resolved is not None
        name = str(self.device)
        if self.resolved.world.device == name:
            return
        parity = of_change("world.device", PLAIN["world.device"], name, facts)
        choice = Choice(value=name, reason=self._why_device, parity=parity)
        choices = {**self.resolved.choices, "world.device": choice}
        self.resolved = self.requested.resolve(choices, self.resolved.machine, facts)

    def _reduction(self) -> Reduction:
        """How the ranks add up, which is noted in the Recipe where that left it open."""
        assert self.resolved is not None
        asked = self.requested.world
        is_exact = self.allow < Parity.TOLERANT
        reduction = reduction_of(asked, self.world, self.device, exact=is_exact)
        if asked.reduction == "auto" and isinstance(reduction, Shared):
            parity = Parity.EXACT if self.world.size == 2 else Parity.TOLERANT
            why = "all ranks share one node's memory"
            choice = Choice(value="shared", reason=why, parity=parity)
            choices = {**self.resolved.choices, "world.reduction": choice}
            self.resolved = self.requested.resolve(choices, self.resolved.machine)
        return reduction

    def follow(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, resolved: ResolvedRecipe
    ) -> None:
        """Evaluate in this process, at the precision at which ranks elsewhere have trained."""
        self.model, self.optimizers, self.resolved = model, (optimizer,), resolved
        self._place(model)
        switch = Switch(model, optimizer, self.device)
        switch.now = switch.now.but(precision=resolved.compute.precision)
        self.stepper = Stepper(switch)
        self._reads_are_free = self.device.type == "cpu"
        self._channels_last = False

    def _note_undo(self) -> None:
        """What a script expects to find as it was: its model's code and torch's global settings."""
        undo = self._undo.callback
        undo(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        undo(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        undo(self.stepper.switch.release)

    def _scale_rates(self, data: Source | None) -> None:
        """Follow the user's rule for the learning rate; trials ran without it."""
        scale, words = scale_rates(
            self.lr_rule,
            self.optimizers,
            data,
            self.first_batch_size,
            self.accumulate,
            scheduled=bool(self.schedulers),
        )
        if self._resumed is None:
            self.stepper.notes += words  # after a resume the History has them
        elif scale is not None and scale.changes:
            words = [resumed_words(scale, self.step_count)]
        for line in words:
            self.say(line)
        self.lr_scale = scale
        if scale is not None and scale.changes:
            self.stepper.lr_scale = scale

    def _warn_of_trips(self, compute: Compute, batch: Batch) -> None:
        """Say which data leave the device and come back in a step: each trip waits twice."""
        if self.device.type == "cpu":
            return

        def trips(pieces: list[Batch]) -> list[PingPong]:
            with untouched(self.model):
                return find_ping_pong(lambda: compute(pieces[0]))

        for trip in self.stepper.look(batch, trips):
            self.say(trip.words)

    def _estimate_pieces(self, compute: Compute, batch: Batch) -> int:
        """Into how many micro-batches the steps split a batch, by the memory that is free."""
        if self.device.type == "cpu" and self.stepper.micro_batch == "auto":
            # The most that any rank needs.
            pieces = max(self.world.gather(estimate_pieces(self.model, compute, batch)))
            self.stepper.pieces = pieces
        return self.stepper.pieces

    def _tell_of_pieces(self, batch: Batch) -> None:
        if self.stepper.pieces > 1:
            self.say(
                f"a batch of {batch.size} would not fit in the free memory: "
                f"it runs in {self.stepper.pieces} micro-batches, same global batch"
            )

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
        self.batch_in_epoch = self._taken = 0
        for turn in self.stepper.turns.values():
            turn.tally.reset()

    def batches(self, source: Source) -> Iterator[Batch]:
        """This epoch's batches on the device, from where a resume left off.

        Raises:
            DataError: where the source cannot give them, or a resume finds other data.
        """
        self.source = source
        iterator, log = self._begin(source), self.world.collectives
        while True:
            start, before = clock(), log.waited
            batch = next(iterator, None)
            if batch is None:
                break
            # Where ranks agree on whether all have a batch, the slowest keeps the others waiting.
            fetched, others = clock(), log.waited - before
            self._taken += 1
            batch = self.ready(batch)
            ready = clock()
            first, fetch, copy, waited = self._lanes or (start, 0, 0, 0)
            # Of several batches that make a step together all count.
            fetch += fetched - start - others
            self._lanes = (first, fetch, copy + ready - fetched, waited + others)
            yield batch

    def ready(self, batch: Batch) -> Batch:
        """The batch on the device, in the memory format that was chosen."""
        if not self._reads_are_free:
            batch = to(batch, self.device, True)
        if not self._channels_last:
            return self.inputs(batch)
        return to_memory_format(self.inputs(batch, torch.channels_last), torch.channels_last)

    def _begin(self, source: Source) -> Iterator[Batch]:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.state["source"] is not None:
            check_same_data(source, resumed.state, None)
            own = self._own_of(resumed)
            source.load_state_dict(own["source"])
            # Once more, because callbacks may have drawn since the checkpoint was loaded.
            set_random_state(own["random"])
        self._taken = self.batch_in_epoch
        part = part_of(source, self.world, self._note)
        if hasattr(source, "expect_epochs"):
            source.expect_epochs(self.planned_epochs)
        batches = part.batches(self.epoch, self.batch_in_epoch)
        if isinstance(source, Pipeline) and source.prefetches is None and self.device.type != "cpu":
            return prefetch(batches, self.device)
        return batches

    def _note(self, line: str) -> None:
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
                With `accumulate`, each such set gathers batches of its own.

        Raises:
            NumbersError: where gradients were not finite; the weights are those before the step. Of
            several ranks the one whose part of the batch is the cause raises it.
            OutOfMemory: where no allowed micro-batch fits.
            FlatoutError: `prepare` was not given this optimizer.
        """
        turn = self._turn_of(optimizer)
        if self.accumulate > 1:
            if not turn.gathered:
                turn.gathered_from = self._taken
            turn.gathered.append(batch)
            if len(turn.gathered) < self.accumulate:
                return False
            return self.flush(compute, optimizer)
        self._step(compute, (batch,), turn)
        return True

    def flush(self, compute: Compute, optimizer: Optimizers | None = None) -> bool:
        """Make an optimizer step of the batches gathered so far, as at the end of an epoch."""
        turn = self._turn_of(optimizer)
        if not turn.gathered:
            return False
        batches = tuple(turn.gathered)
        turn.gathered.clear()
        self._step(compute, batches, turn)
        return True

    def _turn_of(self, optimizer: Optimizers | None) -> Turn:
        return self.stepper.joint if optimizer is None else self.stepper.turn_of(optimizer)

    def _step(self, compute: Compute, batches: tuple[Batch, ...], turn: Turn) -> None:
        start, fetch, copy, others = self._lanes or (clock(), 0, 0, 0)
        self._lanes = None
        try:
            done = self.stepper(compute, batches, self.step_count + 1, turn)
        except (IndexError, RuntimeError, ValueError) as error:
            found = one_sample(error, batches, self.step_count + 1)
            found = found or outside(error, self.model, batches, compute, self.source)
            if found is None:
                raise
            raise found from error
        stepped = clock()
        if self._reads_are_free:
            if turn.update.was_bad():
                raise self._explain(compute, batches, self.step_count + 1, self._rate_of(turn))
        else:
            self._note_flag(compute, len(batches), turn)
        self.step_count += 1
        self.step_in_epoch += 1
        self.batch_in_epoch = self._taken
        turn.tally.add(done.loss, done.weight)
        now = clock()
        self.timeline.record(
            start,
            fetch,
            copy,
            done.forward,
            done.backward,
            done.sync + others,
            done.optimizer,
            now - stepped,
            sum([_on_all_ranks(batch, self.world.size) for batch in batches]),
        )
        if self._live is not None and now >= self._live.due:
            self._live.write()
        if self.stepper.world.size > 1:
            self.pace.mark()

    def mean_loss(self, optimizer: Optimizers | None = None) -> float:
        """Weighted mean loss of this epoch so far; waits for the device.

        Args:
            optimizer: of the steps of this one, or of these together; None for all steps.
        """
        turns = self.stepper.turns.values() if optimizer is None else [self._turn_of(optimizer)]
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
        return self.stepper.switch.autocast()

    def notes(self) -> list[str]:
        """What happened since the last call that the user should know."""
        notes, self.stepper.notes = self.stepper.notes, []
        found = found_of(self.source)
        if found is not None:
            notes += [f"input: {note}" for note in found.notes]
            found.notes.clear()
        return notes

    def note_workers(self) -> None:
        """Say in the Recipe who makes the batches, where that was found while training."""
        found = found_of(self.source)
        if found is None or not found.trials or self.requested.input.workers != "auto":
            return
        assert self.resolved is not None
        choice = Choice(
            value=found.settled,
            reason=f"measured on the job's own steps: {'; '.join(found.trials)}",
            parity=Parity.EXACT,
            ratio=None if found.kept is None else found.kept.ratio,
            floor=None if found.kept is None else found.kept.floor,
        )
        choices = {**self.resolved.choices, "input.workers": choice}
        self.resolved = self.requested.resolve(choices, self.resolved.machine)

    # -- numbers guard -----------------------------------------------------------------------

    def _note_flag(self, compute: Compute, batches: int, turn: Turn) -> None:
        """Remember this step's flag on the device; read the flags only now and then."""
        flag = turn.update.flag
        if flag is None:
            return
        rate = self._rate_of(turn)
        step = self.step_count + 1
        first = self._taken - batches
        flag = flag.clone()
        self._flags.append(_Flag(step, self.epoch, first, batches, rate, flag, compute))
        if len(self._flags) >= guard.EVERY:
            self.check_numbers()

    def check_numbers(self, compute: Compute | None = None) -> None:
        """Read the flags that are still unread; call it before evaluating or saving.

        Args:
            compute: makes a bad step once more to find its cause; that of the step by default.

        Raises:
            NumbersError: naming the first step that was bad.
        """
        flags, self._flags = self._flags, []
        if not flags:
            return
        read = torch.stack([flag.bad for flag in flags]).tolist()
        for flag, was_bad in zip(flags, read, strict=True):
            if was_bad:
                again = self._fetch_again(flag)
                raise self._explain(compute or flag.compute, again, flag.step, flag.rate)

    def _fetch_again(self, flag: _Flag) -> list[Batch]:
        source = self.source
        if source is None or not source.seekable:
            return []
        own = ranked(source, self.world.rank, self.world.size)
        again = own.batches(flag.epoch, flag.first_batch)
        return [self.inputs(to(batch, self.device)) for batch in islice(again, flag.batches)]

    def _explain(
        self, compute: Compute, batches: Sequence[Batch], step: int, rate: float
    ) -> NumbersError:
        batches, keyed = placed(batches), self.stepper.dropout

        def forward(batch: Batch) -> Any:
            if keyed is not None:
                keyed.at(batch.start, batch.size)
            with self.autocast():
                return compute(batch)

        def pieces(batch: Batch) -> int:
            return pieces_for(batch.size, self.stepper.micro_batch) * self.stepper.pieces

        # Of several batches the first with a bad loss; where only a gradient is bad, the first.
        culprit = next(iter(batches), None)
        with nullcontext() if keyed is None else keyed.step(step):
            if len(batches) > 1:
                with untouched(self.model), torch.no_grad():
                    culprit = next(
                        (
                            batch
                            for batch in batches
                            if not all(_is_finite(forward(p)) for p in split(batch, pieces(batch)))
                        ),
                        culprit,
                    )
            return guard.explain_bad_step(
                self.model,
                forward,
                culprit,
                step=step,
                learning_rate=rate,
                held_back=self.stepper.update.gated,
                pieces=1 if culprit is None else pieces(culprit),
                world=self.world,
            )

    # -- checkpoints -------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in `run`.

        Raises:
            CheckpointError: if the Loop has no `run` folder.
        """
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                self._checkpoint_folder,
                keep_last=self.requested.save.keep_last,
                keep_best=1,
                asynchronous=self.requested.save.asynchronous,
                pieces=Pieces(self.world) if self._writes_pieces else None,
            )
        return self._checkpoints

    @property
    def _writes_pieces(self) -> bool:
        return self.requested.save.pieces == "per_rank" and self.world.size > 1

    def _check_folder(self) -> None:
        """Find out now, and not an hour later, whether checkpoints can be written."""
        if self.run is None:
            return
        if self._writes_pieces:
            check_shared(Folder(self._checkpoint_folder), self.world)
        elif self.world.is_first:
            self.checkpoints.check_writable()
        if self.world.is_first and "://" not in self.run:
            self._in_use = InUse(self.run)

    def mend_folder(self) -> bool:
        """Whether the run folder was removed while this job runs; it is taken again then.

        Raises:
            CheckpointError: another job has begun in its place.
        """
        if self.run is None or self._in_use is None or not self._in_use.is_gone:
            return False
        self._in_use.release()
        self._in_use = InUse(self.run)
        return True

    @property
    def _checkpoint_folder(self) -> str:
        if self.run is None:
            raise CheckpointError(
                "there is no run folder", do="give Loop or Trainer run='runs/name'"
            )
        return f"{self.run}/checkpoints"

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
        self._check_gathered()
        guard.check_state(self.model, "saving")
        meta = {"recipe": dumps(self.resolved)}
        state, weights = state_of(self, extra), weights_of(self.model)
        own_state = own_state_of(self, own)
        if self._writes_pieces:
            name = self.checkpoints.save(
                self.step_count,
                weights,
                state,
                meta,
                score,
                [own_state],
                ["optimizers"],
                self.metadata,
            )
            path = f"{self._checkpoint_folder}/{name}"
        else:
            by_rank = self.world.gather(own_state)
            path = self.next_checkpoint()
            if self.world.is_first:
                # The same name: nobody else writes into a run folder.
                name = self.checkpoints.save(
                    self.step_count, weights, state, meta, score, by_rank, metadata=self.metadata
                )
                path = f"{self._checkpoint_folder}/{name}"
        self._saved = (self.epoch, self.step_count)
        return path

    def _check_gathered(self) -> None:
        """A resume goes on behind the last batch of any optimizer's step."""
        for turn in self.stepper.turns.values():
            if turn.gathered and 0 < turn.gathered_from <= self.batch_in_epoch:
                names = ", ".join(type(optimizer).__name__ for optimizer in turn.optimizers)
                raise CheckpointError(
                    f"{len(turn.gathered)} batches that {names} has gathered for a step would be "
                    "lost in a resume, since another optimizer has stepped behind them",
                    where=f"step {self.step_count:,}, batch {self.batch_in_epoch:,} of the epoch",
                    do="save where no optimizer waits for batches, or call "
                    "loop.flush(compute, optimizer) first",
                )

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint is of this very place in training."""
        return self._saved == (self.epoch, self.step_count)

    def next_checkpoint(self) -> str:
        """The path that `save` would return now.

        Raises:
            CheckpointError: if the Loop has no `run` folder.
        """
        path = None
        if self.world.is_first:
            folder = Folder(self._checkpoint_folder)
            name = f"step-{self.step_count:09d}"
            names = chain([name], (f"{name}.{again}" for again in count(1)))
            path = f"{self._checkpoint_folder}/{next(n for n in names if not folder.exists(n))}"
        return str(self.world.from_first(path))

    def _find_checkpoint(self) -> LoadedCheckpoint | None:
        if not self._resume and self.run is None:
            return None
        if isinstance(self._resume, str):
            return self._load(self._resume)
        # One rank looks, so that all find the same.
        name = self.world.from_first(self.checkpoints.latest() if self.world.is_first else None)
        if name is None:
            return None
        if not self._resume:
            raise CheckpointError(
                f"the run folder has checkpoints of an earlier fit, the newest is {name}",
                where=self._checkpoint_folder,
                do="go on from it with resume=True, choose another run folder, or delete this one",
            )
        return self._load(name)

    def _load(self, name: str) -> LoadedCheckpoint:
        """Each rank reads the checkpoint; where not all see it, the first sends it."""
        sees = Folder(self._checkpoint_folder).exists(name)
        if all(self.world.gather(sees)):
            return self.checkpoints.load(name)
        loaded = self.checkpoints.load(name) if self.world.is_first else None
        return LoadedCheckpoint(**self.world.from_first(None if loaded is None else vars(loaded)))

    def _take_recipe(self, loaded: LoadedCheckpoint) -> None:
        """A resumed run keeps the settings it had, but for those that are asked for by name now.

        On another machine they are decided anew.
        """
        saved = loads(loaded.meta["recipe"])
        assert isinstance(saved, ResolvedRecipe)
        same, differences = saved.on_this_machine(fingerprint().as_dict())
        if not same:
            self.say(f"settings are decided anew on this machine: {'; '.join(differences)}")
            return
        if any(one.name == "allow" for one in self._changes.taken):
            self.say(f"settings are decided again, with allow={self.allow.name.lower()}")
            return
        asked = {field: v for field, v in self.requested.named().items() if v != "auto"}
        here = {**asked, "world.device": str(self._device_here()[0])}
        changed = [
            f"{f}={v} (was {saved.get(f)})" for f, v in asked.items() if here[f] != saved.get(f)
        ]
        if changed:
            self.say(f"settings differ from the checkpoint's: {', '.join(changed)}")
        left = [f for f, c in saved.choices.items() if c.reason == ASKED and f not in asked]
        kept = [f"{f}={saved.get(f)}" for f in left if saved.get(f) != self.requested.get(f)]
        if kept:
            self.say(f"kept from the checkpoint, though not asked for now: {', '.join(kept)}")
        # Whether a step may be split when memory runs out is a rule, not a measured value.
        # Each rank has a device of its own, and what was not here may be here now.
        open_again = {
            "memory.micro_batch": self.requested.memory.micro_batch,
            "world.device": self.requested.world.device,
        }
        if len(loaded.own) != self.world.size:
            open_again["world.reduction"] = "auto"
        self.requested = saved.request().replace({**open_again, **asked})
        self._kept = saved
        self._checkpoints = None  # made anew, as the saved settings say

    def _restore(self, loaded: LoadedCheckpoint) -> None:
        put_back(self, loaded, self._changes, same_machine=self._kept is not None)
        set_random_state(self._own_of(loaded)["random"])
        self.restored_own = [one["own"] for one in loaded.own]
        self._resumed = loaded
        self._saved = (self.epoch, self.step_count)
        then, now = len(loaded.own), self.world.size
        ranks = "" if then == now else f", {then} -> {now} ranks"
        self.say(
            f"resumed step {self.step_count:,} from {loaded.name}{ranks}, 0 samples repeated, "
            "0 skipped"
        )
        if self._changes.taken:
            words = "\n".join(map(in_words, self._changes.taken))
            self.say(f"changed since the checkpoint, and taken over:\n{words}")

    def _own_of(self, loaded: LoadedCheckpoint) -> Any:
        """What was this rank's own; on another World, the first's."""
        return loaded.own[self.world.rank if len(loaded.own) == self.world.size else 0]

    def close(self) -> None:
        """Take code changes off the model, put torch's settings back, and end the saving.

        Raises:
            CheckpointError: if the last checkpoint could not be written.
        """
        failed = sys.exc_info()[0]
        if self._trial is not None and sys.exc_info()[0] is None:
            self._trial.end()
        self.timeline.stop()
        if self._live is not None:
            self._live.close()
            self._live = None
        if hasattr(self, "stepper"):
            self.stepper.close()
        self._undo.close()
        try:
            if self._checkpoints is not None:
                if failed is not None:
                    self._checkpoints.give_up(0 if issubclass(failed, LostRank) else _LAST_PIECES_S)
                self._checkpoints.wait()
        finally:
            if self._in_use is not None:
                self._in_use.release()


def _listed(given: Any) -> tuple[Any, ...]:
    """Nothing, one, or a list or tuple of several."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def _is_finite(value: Any) -> bool:
    loss = value[0] if isinstance(value, tuple) else value
    return bool(torch.isfinite(loss).all())


def _on_all_ranks(batch: Batch, ranks: int) -> int:
    """Samples of the batch that this one is a part of; about, where ranks have samples of own."""
    return batch.samples if ranks == 1 else batch.whole or batch.samples * ranks


def _samples_of(batches: Sequence[Batch]) -> float:
    """About how many samples a batch has, as a share of a copy where several ranks have it."""
    return batches[0].size / batches[0].copies if batches else 0.0
