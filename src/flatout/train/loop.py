"""The pieces of Flatout for a training loop of one's own; the Trainer is written on them.

    loop = flatout.Loop(run="runs/mine")
    model, optimizer = loop.prepare(model, optimizer, compute=compute, data=source, steps=...)
    for epoch in loop.epochs(5):
        for batch in loop.batches(source):
            loop.step(compute, batch)
        print(epoch, loop.mean_loss())
    loop.save()

`compute(batch)` runs forward and loss of one batch and returns a mean over its samples, or (sum,
weight).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any

import torch
from torch import nn

from flatout.data.batch import Batch, to, to_memory_format
from flatout.data.source import Source
from flatout.devices import find_ping_pong, place, process, resolve_device
from flatout.errors import CheckpointError, DataError, FlatoutError, NumbersError
from flatout.measure import Timeline, fingerprint
from flatout.models import facts_of
from flatout.optim.fused import align_state, fuse
from flatout.recipe import Parity, Recipe, ResolvedRecipe, dumps, effective, from_file, loads
from flatout.save.checkpoint import Checkpoints, LoadedCheckpoint
from flatout.save.fits import check_fits
from flatout.train import auto, guard
from flatout.train.checks import check_first_batch
from flatout.train.micro_batch import estimate_pieces
from flatout.train.settings import Settings, Switch
from flatout.train.snapshot import random_state, set_random_state, untouched
from flatout.train.step import Compute, Stepper
from flatout.train.tally import Tally

Scheduler = Any  # torch's schedulers share no base class that covers ReduceLROnPlateau


def say(line: str) -> None:
    """Tell the user something that was decided for them."""
    print(f"flatout: {line}", file=sys.stderr, flush=True)


class Loop:
    """Everything around a training step: settings, steps, guard, timeline, checkpoints.

    Args:
        recipe: requested settings; what they leave open is decided by measuring.
        allow: how far the result may differ from the plain job: "exact", "tolerant", "redrawn".
        seed: decides the sample order together with epoch and sample number.
        accumulate: batches whose gradients make one optimiser step.
        clip_norm: largest total 2-norm of the gradients, or None.
        clip_value: largest absolute gradient element, or None.
        run: folder (or fsspec URL) for checkpoints and logs; None writes nothing.
        resume: True for the latest checkpoint of `run`, or the name of one.
        say: what prints decisions; `lambda line: None` for silence.
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
        run: str | Path | None = None,
        resume: bool | str = False,
        say: Callable[[str], None] = say,
    ) -> None:
        if accumulate < 1:
            raise FlatoutError(f"accumulate must be at least 1, found {accumulate}")
        self._say = say
        self._first_words: list[str] = []
        self.requested = self._effective(recipe)
        self.allow = Parity.from_name(allow)
        self.seed = seed
        self.accumulate = accumulate
        self.run = None if run is None else str(run)
        self.timeline = Timeline()
        self.step_count = 0
        self.epoch = 0
        self.step_in_epoch = 0
        self.resolved: ResolvedRecipe | None = None
        self._clip = (clip_norm, clip_value)
        self._resume = resume
        self._resumed: dict[str, Any] | None = None
        self.restored_extra: Any = None
        self._tally = Tally()
        self._gathered: list[Batch] = []
        self._flags: list[tuple[int, int, float, torch.Tensor]] = []
        self._source: Source | None = None
        self._lanes = (0, 0, 0)
        self._checkpoints: Checkpoints | None = None

    def _effective(self, recipe: Recipe | ResolvedRecipe | None) -> Recipe:
        """`--set` over code over `--recipe`; a file measured elsewhere is decided anew."""
        code = recipe.request() if isinstance(recipe, ResolvedRecipe) else recipe
        file = from_file()
        if isinstance(file, ResolvedRecipe):
            same, differences = file.on_this_machine(fingerprint().as_dict())
            if not same:
                self._first_words.append(
                    f"the Recipe is from another machine ({'; '.join(differences)}): decided anew"
                )
                return effective(code, file=file.anew())
        return effective(code)

    # -- before training ---------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler | None = None,
        *,
        compute: Compute | None = None,
        data: Source | None = None,
        steps: int | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Place the model, decide the settings and switch to them; resume if that was asked for.

        Args:
            model: the user's own object; it is changed in place.
            optimizer: any torch optimiser over its parameters.
            scheduler: saved and resumed with the rest; stepping it is the caller's.
            compute: forward and loss of one batch. With `data`, open settings are measured.
            data: where the first batches come from; they are not used up.
            steps: optimiser steps that are planned, so that measuring costs its share at most.

        Raises:
            DeviceError, RecipeError, CheckpointError: see there.
        """
        _refuse_many_ranks()
        for line in self._first_words:
            self._say(line)
        loaded = self._find_checkpoint()
        if loaded is not None:
            self._take_recipe(loaded)
        self.device, reason = resolve_device(
            self.requested.world.device, self.requested.world.placement == "strict"
        )
        asked = self.requested.world.device
        if asked not in ("auto", str(self.device), self.device.type):
            self._say(reason)
        self.placement = place(model, self.device)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        process.apply(self.requested.process)
        self.stepper = Stepper(
            Switch(model, optimizer, self.device),
            clip_norm=self._clip[0],
            clip_value=self._clip[1],
            micro_batch=self.requested.memory.micro_batch,
        )
        if self.requested.compute.deterministic:
            torch.use_deterministic_algorithms(True)
        first = [to(b, self.device) for b in data.peek(2)] if compute and data else []
        if first and compute is not None:
            check_first_batch(model, compute, first[0])
            self._warn_of_trips(compute, first[0])
        facts = facts_of(model, str(self.device))
        self.resolved = auto.resolve(
            self.requested, self.stepper, compute, first, facts, self.allow, steps, self._say
        )
        self.stepper.use(Settings.of(self.resolved))
        self._reads_are_free = self.device.type == "cpu"
        self._moves = not self._reads_are_free
        self._format = self.resolved.compute.memory_format
        if first and compute is not None:
            self._fit_in_memory(compute, first[0])
        if loaded is not None:
            self._restore(loaded)
        return model, optimizer

    def _warn_of_trips(self, compute: Compute, batch: Batch) -> None:
        """Say which data leave the device and come back in a step: each trip waits twice."""
        if self.device.type == "cpu":
            return
        with untouched(self.model):
            for trip in find_ping_pong(lambda: compute(batch)):
                self._say(trip.words)

    def _fit_in_memory(self, compute: Compute, batch: Batch) -> None:
        if self.device.type == "cpu" and self.stepper.micro_batch == "auto":
            pieces = estimate_pieces(self.model, compute, batch)
            if pieces > 1:
                self.stepper.pieces = pieces
                self._say(
                    f"a batch of {batch.size} would not fit in the free memory: "
                    f"it runs in {pieces} micro-batches, same global batch"
                )

    # -- training ----------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Epoch numbers from the present one (after a resume not 0) up to `total`."""
        while self.epoch < total:
            yield self.epoch
            self.finish_epoch()

    def finish_epoch(self) -> None:
        """Count the epoch and forget its loss."""
        self.epoch += 1
        self.step_in_epoch = 0
        self._tally.reset()

    def batches(self, source: Source) -> Iterator[Batch]:
        """This epoch's batches on the device, from where a resume left off."""
        self._source = source
        iterator = iter(self._begin(source))
        while True:
            start = clock()
            batch = next(iterator, None)
            if batch is None:
                break
            fetched = clock()
            if self._moves:
                batch = to(batch, self.device, True)
            if self._format == "channels_last":
                batch = to_memory_format(batch, torch.channels_last)
            self._lanes = (start, fetched - start, clock() - fetched)
            yield batch

    def _begin(self, source: Source) -> Iterator[Batch]:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._check_same_data(source, resumed)
            source.load_state_dict(resumed["source"]["state"])
            # Once more, because callbacks may have drawn since the checkpoint was loaded.
            set_random_state(resumed["random"])
        return source.batches(self.epoch, self.step_in_epoch * self.accumulate)

    def step(self, compute: Compute, batch: Batch) -> bool:
        """Train on one batch; returns whether that completed an optimiser step.

        Raises:
            NumbersError: where gradients were not finite; the weights are those before the step.
            OutOfMemory: where no allowed micro-batch fits.
        """
        if self.accumulate > 1:
            self._gathered.append(batch)
            if len(self._gathered) < self.accumulate:
                return False
            return self.flush(compute)
        self._step(compute, (batch,))
        return True

    def flush(self, compute: Compute) -> bool:
        """Make an optimiser step of the batches gathered so far, as at the end of an epoch."""
        if not self._gathered:
            return False
        batches = tuple(self._gathered)
        self._gathered.clear()
        self._step(compute, batches)
        return True

    def _step(self, compute: Compute, batches: tuple[Batch, ...]) -> None:
        done = self.stepper(compute, batches, self.step_count + 1)
        stepped = clock()
        self.step_count += 1
        self.step_in_epoch += 1
        if self._reads_are_free:
            if self.stepper.update.was_bad():
                raise self._explain(compute, batches[0], self.step_count)
        else:
            self._note_flag(compute)
        self._tally.add(done.loss, done.weight)
        start, fetch, copy = self._lanes
        self.timeline.record(
            start, fetch, copy, done.forward, done.backward, 0, done.optimiser, clock() - stepped
        )

    def mean_loss(self) -> float:
        """Weighted mean loss of this epoch so far; waits for the device."""
        return self._tally.mean()

    def notes(self) -> list[str]:
        """What happened since the last call that the user should know."""
        notes, self.stepper.notes = self.stepper.notes, []
        return notes

    # -- numbers guard -----------------------------------------------------------------------

    def _note_flag(self, compute: Compute) -> None:
        """Remember this step's flag on the device; read the flags only now and then."""
        flag = self.stepper.update.flag
        if flag is None:
            return
        rate = float(self.optimizer.param_groups[0]["lr"])
        self._flags.append((self.step_count, self.step_in_epoch, rate, flag.clone()))
        if len(self._flags) >= guard.EVERY:
            self.check_numbers(compute)

    def check_numbers(self, compute: Compute) -> None:
        """Read the flags that are still unread; call it before evaluating or saving.

        Raises:
            NumbersError: naming the first step that was bad.
        """
        flags, self._flags = self._flags, []
        if not flags:
            return
        bad = torch.stack([flag for *_, flag in flags]).tolist()
        for (step, in_epoch, _, _), was_bad in zip(flags, bad, strict=True):
            if was_bad:
                raise self._explain(compute, self._fetch_again(in_epoch), step)

    def _fetch_again(self, in_epoch: int) -> Batch | None:
        source = self._source
        if source is None or not source.seekable:
            return None
        batch = next(iter(source.batches(self.epoch, (in_epoch - 1) * self.accumulate)), None)
        return None if batch is None else to(batch, self.device, False)

    def _explain(self, compute: Compute, batch: Batch | None, step: int) -> NumbersError:
        def cast(b: Batch) -> Any:
            with self.stepper.switch.autocast():
                return compute(b)

        return guard.explain_bad_step(
            self.model,
            cast,
            batch,
            step=step,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            held_back=self.stepper.update.gated,
        )

    # -- checkpoints -------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in `run`.

        Raises:
            CheckpointError: if the Loop has no `run` folder.
        """
        if self.run is None:
            raise CheckpointError(
                "there is no run folder", do="give Loop or Trainer run='runs/name'"
            )
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                f"{self.run}/checkpoints",
                keep_last=self.requested.save.keep_last,
                asynchronous=self.requested.save.asynchronous,
            )
        return self._checkpoints

    def save(self, extra: Any = None, score: float | None = None) -> str:
        """Write a checkpoint of everything; returns its name. Resuming from it is bitwise.

        Args:
            extra: more state of the caller: numbers, strings, lists, dicts, tensors.
            score: what `keep_best` compares.
        """
        assert self.resolved is not None
        guard.check_state(self.model, "saving")
        scaler = self.stepper.scaler
        state = {
            "epoch": self.epoch,
            "step": self.step_count,
            "step_in_epoch": self.step_in_epoch,
            "seed": self.seed,
            "accumulate": self.accumulate,
            "pieces": self.stepper.pieces,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": random_state(),
            "loss": self._tally.state_dict(),
            "source": None if self._source is None else _source_state(self._source),
            "extra": extra,
        }
        meta = {"recipe": dumps(self.resolved)}
        self.checkpoints.save(self.step_count, self.model.state_dict(), state, meta, score)
        return f"{self.run}/checkpoints"

    def _find_checkpoint(self) -> LoadedCheckpoint | None:
        if not self._resume:
            return None
        name = self._resume if isinstance(self._resume, str) else self.checkpoints.latest()
        return None if name is None else self.checkpoints.load(name)

    def _take_recipe(self, loaded: LoadedCheckpoint) -> None:
        """A resumed run keeps the settings it had; on another machine they are decided anew."""
        saved = loads(loaded.meta["recipe"])
        assert isinstance(saved, ResolvedRecipe)
        same, differences = saved.on_this_machine(fingerprint().as_dict())
        if same:
            micro_batch = self.requested.memory.micro_batch
            self.requested = saved.request().replace({"memory.micro_batch": micro_batch})
        else:
            self._say(f"settings are decided anew on this machine: {'; '.join(differences)}")

    def _restore(self, loaded: LoadedCheckpoint) -> None:
        state = loaded.state
        check_fits(self.model.state_dict(), loaded.model)
        self.model.load_state_dict(loaded.model)
        self.optimizer.load_state_dict(state["optimizer"])
        align_state(self.optimizer)
        if self.stepper.switch.now.fused_optimizer:
            fuse(self.optimizer)
        self.stepper.update.refresh()
        if self.scheduler is not None and state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.stepper.scaler is not None and state["scaler"] is not None:
            self.stepper.scaler.load_state_dict(state["scaler"])
        self.epoch, self.step_count = state["epoch"], state["step"]
        self.step_in_epoch = state["step_in_epoch"]
        self.stepper.pieces = state["pieces"]
        self._tally.load_state_dict(state["loss"])
        self._check_same_order(state)
        self._resumed = state if state["source"] is not None else None
        self.restored_extra = state["extra"]
        set_random_state(state["random"])
        self._say(
            f"resumed step {self.step_count:,} from {loaded.name}, 0 samples repeated, 0 skipped"
        )

    def _check_same_order(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed or state["accumulate"] != self.accumulate:
            raise CheckpointError(
                f"the checkpoint has seed={state['seed']} accumulate={state['accumulate']}, "
                f"found seed={self.seed} accumulate={self.accumulate}",
                do="use the same values, or start anew with warm_start",
            )

    def _check_same_data(self, source: Source, resumed: dict[str, Any]) -> None:
        saved, now = resumed["source"], _source_state(source)
        if (saved["digest"], saved["batch_size"]) != (now["digest"], now["batch_size"]):
            raise DataError(
                "the training data or batch size differ from those of the checkpoint",
                where=f"then: {saved['words']}\n  now: {now['words']}",
                do="resume with the same data, batch size and seed, or use warm_start",
            )

    def close(self) -> None:
        """Wait for what is still being written and take code changes off the model."""
        self.timeline.stop()
        if self._checkpoints is not None:
            self._checkpoints.wait()
        self.stepper.switch.release()


def _source_state(source: Source) -> dict[str, Any]:
    return {
        "digest": source.digest,
        "batch_size": source.batch_size,
        "words": source.describe(),
        "state": source.state_dict(),
    }


def _refuse_many_ranks() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise FlatoutError(
            f"this release trains on one rank, but WORLD_SIZE is {os.environ['WORLD_SIZE']}",
            do="start the script without torchrun or mpirun",
        )
