"""Checks that a resumed job is that of its checkpoint, and lists each difference, then and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flatout.errors import CheckpointError
from flatout.optim import optimizer_adapter
from flatout.save import LoadedCheckpoint, check_fits
from flatout.train.job_facts import UNREAD, Facts
from flatout.train.resume.changed_rates import Difference, RateChanges, rate_changes

# Maximum number of a model's modules that are listed if many differ.
_SHOWN = 3
# First words of facts that may change in a resume, because they do not affect training or start
# again.
_TAKEN = ("epochs", "validation data", "allow", "arguments of ", "Keras callbacks")
_OTHERWISE = "or begin a new run from its weights: warm_start, in another run folder"


def check_same_job(
    loaded: LoadedCheckpoint,
    now: Mapping[str, Any],
    weights: Mapping[str, Any],
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
) -> RateChanges:
    """Raise, before any change, if the checkpoint belongs to another job than `now`."""
    state = loaded.state
    check_fits(weights, loaded.model, where=loaded.name)
    check_optimizers(optimizers, state)
    then = state.get("job")
    if then is None:
        raise CheckpointError(
            "the checkpoint has no description of its job, since an earlier version of "
            "Flatout wrote it",
            where=loaded.name,
            do="resume with that version, or begin a new run with warm_start",
        )
    if now["told"] and not then["told"]:
        raise CheckpointError(
            "the checkpoint was written by a Loop, not by a Trainer",
            where=loaded.name,
            do="resume with the Loop, or use warm_start",
        )
    differences = _differences(then, now)
    taken = [difference for difference in differences if difference.name.startswith(_TAKEN)]
    refused = [difference for difference in differences if not difference.name.startswith(_TAKEN)]
    changes = RateChanges()
    if not any(item.name == "scheduler" for item in refused):
        changes = rate_changes(optimizers, schedulers, now, then, state)
    refused += changes.refused
    if refused:
        raise CheckpointError(
            "this job differs from the job of the checkpoint:\n"
            + "\n".join(map(in_words, refused)),
            where=loaded.name,
            do=f"resume with the earlier job, {_OTHERWISE}",
        )
    changes.taken[:0] = taken
    return changes


def in_words(difference: Difference) -> str:
    """Describe a difference in three lines."""
    return f"  {difference.name}\n    then: {difference.then}\n    now:  {difference.now}"


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any]) -> None:
    """Raise if saved optimizer states belong to other optimizers or parameter groups."""
    then = [
        _optimizer_words(kind, saved["param_groups"])
        for kind, saved in zip(state["optimizer_kinds"], state["optimizers"], strict=True)
    ]
    now = [_optimizer_words(kind_of(o), o.param_groups) for o in optimizers]
    if then != now:
        raise CheckpointError(
            f"the checkpoint's optimizer is {', '.join(then)}, found {', '.join(now)}",
            do="make the optimizer as it was, or begin a new run with warm_start from a model file",
        )


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, or of the Keras optimizer that it drives."""
    return type(optimizer_adapter(optimizer).given).__qualname__


def _optimizer_words(kind: str, groups: Sequence[Mapping[str, Any]]) -> str:
    sizes = [len(group["params"]) for group in groups]
    return f"{kind} with {sizes} parameters in its groups"


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    return [
        *_of_facts(then["facts"], now["facts"], now["told"]),
        *_of_models(then["model"], now["model"]),
    ]


def _of_facts(then: Facts, now: Facts, told: bool) -> list[Difference]:
    result = []
    for name in {**then, **now}:
        was, is_now = then.get(name), now.get(name)
        if was == is_now or (not told and is_now is None):
            continue  # a Loop that resumes a Trainer's checkpoint has other facts
        if name.startswith("arguments of ") and None in (was, is_now):
            continue  # the list of callbacks itself differs
        if was and is_now and was[0] == is_now[0] and UNREAD in (was[1], is_now[1]):
            continue
        result.append(Difference(name, *_told_apart(was, is_now)))
    return result


def _told_apart(then: list[str] | None, now: list[str] | None) -> tuple[str, str]:
    was, is_now = then or ["none", ""], now or ["none", ""]
    if was[0] != is_now[0]:
        return was[0], is_now[0]
    return tuple(f"{words} (code {digest[:8]})" for words, digest in (was, is_now))  # type: ignore[return-value]


def _of_models(then: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    result = [
        Difference(f"model: {name}", then.get(name, "none"), now.get(name, "none"))
        for name in names[:_SHOWN]
    ]
    if len(names) > _SHOWN:
        result.append(Difference(f"model: {len(names) - _SHOWN:,} more modules", "…", "…"))
    return result
