"""Resuming from a checkpoint: compares the job and the data, and restores the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flatout.data import Batch, Source
from flatout.errors import DataError
from flatout.measure import fingerprint
from flatout.models import adapter_of, load_weights, weights_of
from flatout.optim import align_state, fuse, is_fused
from flatout.recipe import ASKED, PLAIN, Choice, Parity, Recipe, ResolvedRecipe, loads
from flatout.save import LoadedCheckpoint
from flatout.train.job_facts import Facts, compute_fact, fact
from flatout.train.large_batch import as_saved
from flatout.train.loop_state import LoopState
from flatout.train.losses.loss_value import Compute
from flatout.train.rank_device import device_here
from flatout.train.resume.changed_rates import (
    RateChanges,
    arguments_of_schedule,
    keeps_arguments,
    options_of,
    take_over,
)
from flatout.train.resume.same_job import check_same_job, in_words, kind_of
from flatout.train.snapshot import random_state, set_random_state
from flatout.train.tuning.auto import being_measured

# Number of samples of the first batch whose indices are compared, to detect another order.
_SHOWN = 8
_REDUCTION = "world.reduction"
_LIBRARY = "what gloo or NCCL does"
_NEW_RUN = "or begin a new run with warm_start"


class Resume:
    """A checkpoint that a Loop resumes from.

    Attributes:
        name: name of the checkpoint.
        extra: the `extra` argument of the `save` that wrote the checkpoint.
        own: by rank, the `own` argument that the rank gave to `Loop.save`.
    """

    def __init__(self, loop: LoopState, loaded: LoadedCheckpoint) -> None:
        self._loaded = loaded
        self.name = loaded.name
        self._changes = check_same_job(
            loaded, loop.identity.job, weights_of(loop.model), loop.optimizers, loop.schedulers
        )
        self._kept: ResolvedRecipe | None = None
        self._is_due = True
        self.extra = loaded.state["extra"]
        self.own = [own["own"] for own in loaded.own]
        self._own = loaded.own[loop.world.rank if len(loaded.own) == loop.world.size else 0]
        # If ranks read their own batches, each rank compares its own data. Otherwise the first rank
        # compares its data, and `check_ranks` compares the data of the other ranks with them.
        of_all = loaded.state["source"] if loop.world.is_first else None
        self._data = {**loaded.state, "source": self._own.get("data") or of_all}

    def recipe(self, loop: LoopState) -> Recipe:
        """Return the requested Recipe: saved settings, replaced by settings requested by name now.

        On another machine all settings are decided again.
        """
        saved = loads(self._loaded.meta["recipe"])
        assert isinstance(saved, ResolvedRecipe)
        # The first rank decides for all ranks: a rank that measured alone would wait forever.
        here = [*saved.on_this_machine(fingerprint().as_dict())]
        same, differences = loop.world.from_first(here, "whether saved settings hold here")
        if not same:
            loop.say(f"settings are decided again on this machine: {'; '.join(differences)}")
            return loop.asked.recipe
        if any(change.name == "allow" for change in self._changes.taken):
            loop.say(f"settings are decided again, with allow={loop.asked.allow.name.lower()}")
            return loop.asked.recipe
        asked = {field: v for field, v in loop.asked.recipe.named().items() if v != "auto"}
        strategy = asked.get("world.strategy", saved.world.strategy)
        if strategy != saved.world.strategy:  # some settings exclude some strategies
            loop.say(f"settings are decided again, with world.strategy={strategy}")
            return loop.asked.recipe
        _say_changes(loop, saved, asked)
        # The setting that a step may be split when memory runs out is the user's rule, not a
        # measured value. Each rank has its own device, and a device that was missing may be present
        # now.
        open_again = {
            "memory.micro_batch": loop.asked.recipe.memory.micro_batch,
            "world.device": loop.asked.recipe.world.device,
            **{field: loop.asked.recipe.get(field) for field in being_measured(saved)},
        }
        # The method of communication between ranks depends on the hosts that they run on now.
        if len(self._loaded.own) != loop.world.size or not _was_asked(saved, _REDUCTION):
            open_again[_REDUCTION] = "auto"
        self._kept = saved
        return saved.request().replace({**open_again, **asked})

    def choices(self, requested: Recipe) -> tuple[dict[str, Choice], Mapping[str, Any]] | None:
        """Return the saved choices and their machine; None if settings are to be decided now."""
        if self._kept is None or being_measured(self._kept):
            return None
        choices = {
            field: choice
            for field, choice in self._kept.choices.items()
            if requested.get(field) in (choice.value, "auto")
        }
        plain, known = PLAIN[_REDUCTION], choices.get(_REDUCTION)
        if requested.world.reduction == "auto" and (known is None or known.value != plain):
            # Strategies replace this choice if ranks now communicate in another way.
            choices[_REDUCTION] = Choice(value=plain, reason=_LIBRARY, parity=Parity.EXACT)
        return choices, self._kept.machine

    def check_data(self, source: Source, first: list[int] | None) -> None:
        """Raise if the training data, their batches or their order differ from the checkpoint's."""
        check_same_data(source, self._data, first)

    def put_back(self, loop: LoopState) -> None:
        """Restore a prepared Loop to the checkpoint's state, and print that it resumes."""
        put_back(loop, self._loaded, self._changes, same_machine=self._kept is not None)
        set_random_state(self._own["random"])
        then, now = len(self._loaded.own), loop.world.size
        ranks = "" if then == now else f", {then} -> {now} ranks"
        loop.say(
            f"resumed step {loop.step_count:,} from {self._loaded.name}{ranks}, 0 samples "
            "repeated, 0 skipped"
        )
        if self._changes.taken:
            words = "\n".join(map(in_words, self._changes.taken))
            loop.say(f"changed since the checkpoint, and taken over:\n{words}")

    def put_back_source(self, source: Source) -> None:
        """Restore the data's position, before the first epoch that continues."""
        if not self._is_due or self._loaded.state["source"] is None:
            return
        self._is_due = False
        check_same_data(source, self._data, None)
        source.load_state_dict(self._own["source"])
        # The random state is set again, because callbacks may have drawn since the checkpoint was
        # loaded.
        set_random_state(self._own["random"])


def _was_asked(saved: ResolvedRecipe, field: str) -> bool:
    choice = saved.choices.get(field)
    return choice is not None and choice.reason == ASKED


def _say_changes(loop: LoopState, saved: ResolvedRecipe, asked: Mapping[str, Any]) -> None:
    here = {**asked, "world.device": str(device_here(loop.asked.recipe.world)[0])}
    changed = [f"{f}={v} (was {saved.get(f)})" for f, v in asked.items() if here[f] != saved.get(f)]
    if changed:
        loop.say(f"settings differ from the checkpoint's: {', '.join(changed)}")
    left = [f for f, c in saved.choices.items() if c.reason == ASKED and f not in asked]
    kept = [f"{f}={saved.get(f)}" for f in left if saved.get(f) != loop.asked.recipe.get(f)]
    if kept:
        loop.say(f"kept from the checkpoint, though not asked for now: {', '.join(kept)}")


def find_checkpoint(loop: LoopState, compute: Compute | None) -> None:
    """Collect the facts of the job, and apply the settings of a checkpoint, if there is one."""
    loaded = loop.resume_checkpoint
    del loop.resume_checkpoint  # frees its copy of all weights
    loop.identity.job = loop.world.from_first(_job_of(loop, compute))
    loop.identity.groups = [[dict(group) for group in o.param_groups] for o in loop.optimizers]
    if loaded is not None:
        loop.resume = resume = Resume(loop, loaded)
        loop.asked.recipe = resume.recipe(loop)
        del loop.checkpointing  # it is created again with the saved settings


def _job_of(loop: LoopState, compute: Compute | None) -> dict[str, Any]:
    return {
        "facts": {**_facts(loop), **(loop.identity.trainer or compute_fact(compute))},
        "told": loop.identity.trainer is not None,
        "model": adapter_of(loop.model).lines(),
        "options": [options_of(optimizer) for optimizer in loop.optimizers],
        "schedules": [arguments_of_schedule(scheduler) for scheduler in loop.schedulers],
    }


def _facts(loop: LoopState) -> Facts:
    norm, value = loop.asked.clip
    rule = as_saved(loop.asked.lr_rule)
    return {
        "seed": fact(loop.asked.seed),
        "accumulate": fact(loop.asked.accumulate),
        "clip_norm": fact(norm),
        "clip_value": fact(value),
        "lr_rule": fact("none" if rule is None else ", ".join(f"{k}={v}" for k, v in rule.items())),
        "scheduler": fact(", ".join(type(s).__qualname__ for s in loop.schedulers) or "none"),
        "allow": fact(loop.asked.allow.name.lower()),
        "parts": fact(", ".join(type(part).__qualname__ for part in loop.asked.parts) or "none"),
    }


def state_of(loop: LoopState, extra: Any) -> dict[str, Any]:
    """Return all state but the weights that the next step depends on, and the facts of the job.

    All ranks call it.
    """
    strategy, keeps = loop.stepper.strategy, loop.checkpointing.keeps
    return {
        "epoch": loop.epoch,
        "step": loop.step_count,
        "step_in_epoch": loop.progress.step_in_epoch,
        "batch_in_epoch": loop.progress.batch_in_epoch,
        "job": loop.identity.job,
        "optimizers": [strategy.state_of(optimizer, kept=keeps) for optimizer in loop.optimizers],
        "optimizer_kinds": [kind_of(optimizer) for optimizer in loop.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in loop.schedulers],
        "parts": [part.state_dict() for part in loop.asked.parts],
        "turns": [turn.state_dict() for turn in loop.stepper.turns],
        "source": None if loop.feed.source is None else source_state(loop.feed.source),
        "first_samples": loop.first_batches.samples,
        "ids": loop.trainer.ids,
        "strategy": strategy.state_dict(),
        "extra": extra,
    }


def own_state_of(loop: LoopState, own: Any) -> dict[str, Any]:
    """Return the state of this rank alone that the next step depends on."""
    return {
        "random": random_state(),
        "source": None if loop.feed.source is None else loop.feed.source.state_dict(),
        "data": source_state(loop.feed.source)
        if loop.feed.source is not None and loop.first_batches.are_own
        else None,
        "reduction": loop.stepper.strategy.own_state(),
        "own": own,
    }


def source_state(source: Source) -> dict[str, Any]:
    """Return the facts that identify the data."""
    return {
        "digest": source.digest,
        "batch_size": source.batch_size,
        "steps": source.steps,
        "words": source.describe(),
        "stages": getattr(source, "stage_words", []),
    }


def first_samples(first: list[Batch]) -> list[int] | None:
    """Return the numbers of the first samples in the first epoch, where they are known."""
    if not first or first[0].indices is None:
        return None
    return [int(number) for number in first[0].indices[:_SHOWN]]


def check_same_data(source: Source, state: Mapping[str, Any], first: list[int] | None) -> None:
    """Raise if the training data, their batches or their order differ from the checkpoint's."""
    saved, now = state["source"], source_state(source)
    if saved is None:
        return
    if any(saved[key] != now[key] for key in ("digest", "batch_size", "steps", "stages")):
        raise DataError(
            "the training data or batch size differ from those of the checkpoint",
            where=f"then: {_words(saved, now)}\n  now: {_words(now, saved)}",
            do=f"resume with the same data and batch size, {_NEW_RUN}",
        )
    then = state["first_samples"]
    # With more ranks, the first part has fewer samples, so the lists differ in length.
    if then and first and any(a != b for a, b in zip(then, first, strict=False)):
        raise DataError(
            "the samples come in another order than those of the checkpoint",
            where=f"an epoch began with samples {then}, now with {first}",
            do=f"resume with the same seed and shuffle, {_NEW_RUN}",
        )


def put_back(
    loop: LoopState, loaded: LoadedCheckpoint, changes: RateChanges, *, same_machine: bool
) -> None:
    """Load the result of `state_of` and the weights into a prepared Loop, except for new values."""
    state = loaded.state
    load_weights(loop.model, loaded.model)
    strategy = loop.stepper.strategy
    for optimizer, saved in zip(loop.optimizers, state["optimizers"], strict=True):
        load_optimizer(optimizer, strategy.part_of(optimizer, saved))
    replayed = [loop.optimizers[number] for number in changes.replayed]
    for scheduler, saved in zip(loop.schedulers, state["schedulers"], strict=True):
        if not any(getattr(scheduler, "optimizer", None) is item for item in replayed):
            scheduler.load_state_dict(keeps_arguments(scheduler, saved))
    take_over(
        changes, loop.optimizers, loop.identity.groups, loop.schedulers, loop.identity.job, state
    )
    for saved in state["turns"]:
        turn = loop.stepper.turns.at(tuple(saved["optimizers"]))
        turn.load_state_dict(saved, same_machine=same_machine)
    for turn in loop.stepper.turns:
        turn.update.refresh()
    for part, saved in zip(loop.asked.parts, state.get("parts", ()), strict=True):
        part.load_state_dict(saved)
    kept = [own["reduction"] for own in loaded.own]
    strategy.load_own_states([item for item in kept if item is not None])
    strategy.load_state_dict(state.get("strategy", {}))
    progress = loop.progress
    progress.epoch, progress.step_count = state["epoch"], state["step"]
    progress.step_in_epoch = state["step_in_epoch"]
    progress.batch_in_epoch = state["batch_in_epoch"]


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load an optimizer's state and options, except `fused` and `foreach`, which stay as set."""
    kernels = [{k: g.get(k) for k in ("fused", "foreach")} for g in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, own in zip(optimizer.param_groups, kernels, strict=True):
        group.update({k: v for k, v in own.items() if k in group})
    align_state(optimizer)
    if is_fused(optimizer):
        fuse(optimizer)  # moves the state to the device that the fused kernel needs


def _words(state: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    words = f"{state['words']}, batches of {state['batch_size']}, {state['steps']} an epoch"
    stages = [stage for stage in state["stages"] if stage not in other["stages"]]
    if not stages and state["stages"] != other["stages"]:
        stages = state["stages"]  # the same stages in another order
    words += "".join(f", {stage}" for stage in stages)
    if state["digest"] != other["digest"]:
        words += f", content {state['digest'][:8]}"
    return words
