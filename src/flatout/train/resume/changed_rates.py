"""Changes of learning rates, optimizer options and schedules that a resume takes over.

Numbers are taken over: the optimizer's state is kept, and the next step uses the new numbers.
Changes that would need another state (amsgrad, momentum where there was none) are refused.

A schedule is a function of its step. A new schedule, or a new learning rate under it, continues as
if it had been used from the start: the new schedule is stepped to the checkpoint's step.
ReduceLROnPlateau depends on earlier figures, which are kept; its present rate is scaled by the
ratio of the new learning rate to the old.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flatout.data import code_digest, words_of
from flatout.errors import CheckpointError
from flatout.optim import optimizer_adapter

# Entries of a parameter group that are no options of the job, such as the choice of kernels.
_RUNS = ("params", "param_names", "fused", "foreach", "capturable", "differentiable", "kind")
# _BASES: names of the base values that a schedule writes into a parameter group. _SCHEDULED: names
# of all values that a schedule writes.
_BASES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
_SCHEDULED = ("lr", "momentum", "betas", *_BASES)
# Entries of a schedule's state that show its progress, or that repeat values of the parameter
# groups.
_PROGRESS = (
    "last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step", "T_cur",
    "T_i", "best", "num_bad_epochs", "cooldown_counter", "verbose", "base_lrs",
)  # fmt: skip
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


class Difference(NamedTuple):
    """A value that has changed since the checkpoint was written."""

    name: str
    then: str
    now: str


@dataclass
class RateChanges:
    """Changes of a resumed job's optimizers and schedules.

    Attributes:
        taken: changes that are taken over.
        refused: changes that cannot be taken over.
        values: new values of options, by (optimizer index, parameter group index, name).
        replayed: optimizers whose schedules are stepped to the checkpoint's step.
    """

    taken: list[Difference] = field(default_factory=list)
    refused: list[Difference] = field(default_factory=list)
    values: list[tuple[int, int, str]] = field(default_factory=list)
    replayed: set[int] = field(default_factory=set)


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, as plain values."""
    return [
        {name: _plain(value) for name, value in group.items() if name not in _RUNS}
        for group in optimizer_adapter(optimizer).options()
    ]


def arguments_of_schedule(scheduler: Any) -> dict[str, Any]:
    """Return the arguments of a schedule by name, without its progress."""
    result = dict(_flat(scheduler.state_dict()))
    for at, item in enumerate([scheduler, *getattr(scheduler, "_schedulers", ())]):
        functions = getattr(item, "lr_lambdas", None)
        if functions:
            name = f"schedule {at}.lr_lambda" if at else "lr_lambda"
            result[name] = ", ".join(f"code {code_digest(f)[:8]}" for f in functions)
    return result


def rate_changes(
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    now: Mapping[str, Any],
    then: Mapping[str, Any],
    state: Mapping[str, Any],
) -> RateChanges:
    """Compare options and schedules with those of a checkpoint, whose kinds are the same."""
    changes = RateChanges()
    for number, optimizer in enumerate(optimizers):
        groups = then["options"][number], now["options"][number]
        saved = state["optimizers"][number]["param_groups"]
        _compare_options(number, optimizer, schedulers, *groups, saved, changes)
    owners = [id(optimizer) for optimizer in optimizers]
    for number, scheduler in enumerate(schedulers):
        both = then["schedules"][number], now["schedules"][number]
        left = dict(_flat(state["schedulers"][number]))
        _compare_schedule(scheduler, *both, left, owners, changes)
    for number in changes.replayed:
        changes.refused += _not_replayable(schedulers, optimizers[number])
    return changes


def take_over(
    changes: RateChanges,
    optimizers: Sequence[torch.optim.Optimizer],
    fresh_groups: Sequence[Sequence[Mapping[str, Any]]],
    schedulers: Sequence[Any],
    job: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Apply the new options and schedules to optimizers whose state has been loaded.

    Schedulers that are not replayed have been loaded too.
    """
    for number, group, name in changes.values:
        optimizer, fresh = optimizers[number], fresh_groups[number][group]
        if name == "lr" and _plateaus(schedulers, optimizer):
            then = state["job"]["options"][number][group]["lr"]
            reduced = optimizer.param_groups[group]["lr"] / then if then else 1.0
            optimizer.param_groups[group]["lr"] = fresh["lr"] * reduced
        else:
            value = fresh[name] if name in fresh else job["options"][number][group].get(name)
            optimizer_adapter(optimizer).take_option(group, name, value)
    for number in changes.replayed:
        optimizer = optimizers[number]
        for options, own in zip(optimizer.param_groups, fresh_groups[number], strict=True):
            options.update({name: own[name] for name in _SCHEDULED if name in own})
        for place, scheduler in enumerate(schedulers):
            if scheduler.optimizer is optimizer:
                _replay(scheduler, _steps_in(state["schedulers"][place]))


def keeps_arguments(scheduler: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schedule's saved state, with the arguments that it is created with now."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        return dict(saved)
    own = scheduler.state_dict()
    return {
        name: saved[name] if name in _PROGRESS else own.get(name, saved[name]) for name in saved
    }


def _compare_options(
    number: int,
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[Any],
    then_groups: Sequence[Mapping[str, Any]],
    now_groups: Sequence[dict[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    changes: RateChanges,
) -> None:
    scheduled, adapter = _schedules(schedulers, optimizer), optimizer_adapter(optimizer)
    for at, (then, now) in enumerate(zip(then_groups, now_groups, strict=True)):
        skipped = _left_to_schedule(now) if scheduled else ()
        for name in {**then, **now}:
            was, is_now = then.get(name), now.get(name)
            # In a second fit of the same process, the groups have the values that the first fit has
            # left.
            left = saved_groups[at].get("lr" if name in adapter.rate_names else name)
            if was != is_now and left is not None and is_now == _plain(left):
                now[name] = was  # the job's original value, which the next resume compares with
            if name in skipped or was == now.get(name):
                continue
            kind = type(adapter.given).__qualname__
            group = f", group {at + 1}" if len(now_groups) > 1 else ""
            words = f"{_words_of_option(name)} of {kind}{group}"
            difference = Difference(words, str(was), str(is_now))
            if _is_of_schedule(name, then, now):
                changes.taken.append(difference)  # Keras evaluates the schedule in each step
            elif not _may_change(name, was, is_now) or (
                name == "lr" and _foreign_schedule(schedulers, optimizer)
            ):
                changes.refused.append(difference)
            elif scheduled and name in _BASES:
                changes.taken.append(difference)
                changes.replayed.add(number)
            else:
                changes.taken.append(difference)
                changes.values.append((number, at, name))


def _compare_schedule(
    scheduler: Any,
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    left: Mapping[str, Any],
    owners: list[int],
    changes: RateChanges,
) -> None:
    for name in {**then, **now}:
        # A value that moved while the job ran is progress of the schedule, and no argument.
        moved = name in left and left[name] != then.get(name)
        if moved or then.get(name) == now.get(name):
            continue
        words = f"{name} of {type(scheduler).__qualname__}"
        difference = Difference(words, str(then.get(name)), str(now.get(name)))
        if isinstance(scheduler, ReduceLROnPlateau):
            fits = _may_change(name, then.get(name), now.get(name))
            (changes.taken if fits else changes.refused).append(difference)
        elif isinstance(scheduler, LRScheduler):
            changes.taken.append(difference)
            changes.replayed.add(owners.index(id(scheduler.optimizer)))
        else:
            changes.refused.append(difference)


def _not_replayable(
    schedulers: Sequence[Any], optimizer: torch.optim.Optimizer
) -> Iterator[Difference]:
    for scheduler in schedulers:
        if getattr(scheduler, "optimizer", None) is not optimizer:
            continue
        kind = type(scheduler).__qualname__
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            yield Difference(f"the schedule beside {kind}", "as it was", "another one")
        elif _steps_in(scheduler.state_dict()):
            yield Difference(f"{kind}, which has made steps already", "new", "used")


def _replay(scheduler: Any, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer has not stepped
        try:
            for _ in range(steps):
                scheduler.step()
        except ValueError as error:  # the schedule is shorter than the training so far
            raise CheckpointError(
                f"{type(scheduler).__qualname__} as it is made now cannot be brought to step "
                f"{steps:,} of the checkpoint: {error}",
                do="resume with the schedule as it was, or with one that is long enough",
            ) from error


def _steps_in(state: Mapping[str, Any]) -> int:
    if "last_epoch" in state:
        return int(state["last_epoch"])
    return max((_steps_in(item) for item in state.get("_schedulers", ())), default=0)


def _schedules(schedulers: Sequence[Any], optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        for scheduler in schedulers
        if getattr(scheduler, "optimizer", None) is optimizer
    )


def _plateaus(schedulers: Sequence[Any], optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(s, ReduceLROnPlateau) and s.optimizer is optimizer for s in schedulers)


def _foreign_schedule(schedulers: Sequence[Any], optimizer: torch.optim.Optimizer) -> bool:
    return any(
        not isinstance(s, LRScheduler) and getattr(s, "optimizer", optimizer) is optimizer
        for s in schedulers
    )


def _left_to_schedule(options: Mapping[str, Any]) -> tuple[str, ...]:
    if "base_momentum" in options or "max_momentum" in options:
        return ("lr", "momentum", "betas")
    return ("lr",)


def _is_of_schedule(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    prefix, dot, _ = name.rpartition("learning_rate.")
    kind = f"{prefix}learning_rate.class_name"
    return bool(dot) and kind in then and kind in now


def _may_change(name: str, then: Any, now: Any) -> bool:
    name = name.rpartition(".")[2]
    if name in _CLIPS or not (_is_number(then) and _is_number(now)):
        return name == "weight_decay" and {type(then), type(now)} == {float, type(None)}
    return name != "momentum" or bool(then) == bool(now)


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_number, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _words_of_option(name: str) -> str:
    is_rate = name.rpartition(".")[2] in ("lr", "initial_lr", "learning_rate")
    return "learning rate" if is_rate else name


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            if key not in _PROGRESS:
                yield from _flat(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        for at, item in enumerate(value, 1):
            yield from _flat(item, f"{name} {at}")
    else:
        yield name.replace("_schedulers ", "schedule "), _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return words_of(value)
