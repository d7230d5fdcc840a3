"""A parameter group that joins an optimizer whose schedule exists already.

From then on, the group's rate is the one it would have if the group had existed when the schedule
was made. To compute it, copies of the groups run through the schedule from its start. If this does
not lead to the present rates of the other groups (for example because a user has set them), the
first group decides: the new rate is the same multiple of its initial rate.
"""

from __future__ import annotations

import copy
import warnings
from bisect import bisect_right
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import SWALR

from flatout.errors import ModelError

# Names that a schedule writes into each group if it also cycles the momentum.
_CYCLED = ("max_momentum", "base_momentum", "momentum")


def add_late_group(
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    parameters: list[torch.Tensor],
    lr: float | None,
) -> None:
    """Add a parameter group that follows the optimizer's schedule.

    Args:
        optimizer: the optimizer that gets the group.
        scheduler: the scheduler of its rates, or None.
        parameters: parameters that are in no other group.
        lr: the rate that the schedule starts from; under OneCycleLR and CyclicLR, the highest rate.
            None for the default of the optimizer or the schedule.

    Raises:
        ModelError: the schedule has a different function for each group.
    """
    own = {} if lr is None else {"lr": lr}
    optimizer.add_param_group({"params": parameters, **own})
    group = optimizer.param_groups[-1]
    leaves = [] if scheduler is None else list(_leaves(scheduler))
    for leaf in leaves:
        _join(leaf, group, optimizer.param_groups[0], lr)
    if not leaves:
        return
    if all(isinstance(leaf, LRScheduler) for leaf in leaves) and "initial_lr" in group:
        group["lr"] = _rate_by_now(scheduler, optimizer)
    for item in _all(scheduler):
        if hasattr(item, "_last_lr"):
            item._last_lr = [*item._last_lr, group["lr"]]


def _all(scheduler: Any) -> Iterator[Any]:
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all(inner)


def _leaves(scheduler: Any) -> Iterator[Any]:
    return (item for item in _all(scheduler) if not hasattr(item, "_schedulers"))


def _join(scheduler: Any, group: dict[str, Any], other: dict[str, Any], lr: float | None) -> None:
    """Add the group to one schedule, as the schedule's `__init__` would."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.min_lrs = [*scheduler.min_lrs, scheduler.min_lrs[0]]
        return
    base: Any = group["lr"]
    if isinstance(scheduler, OneCycleLR):
        most = other["max_lr"] if lr is None else lr
        base = _divided(most, other["max_lr"], other["initial_lr"])
        least = _divided(base, other["initial_lr"], other["min_lr"])
        group.update(max_lr=most, initial_lr=base, min_lr=least)
    elif isinstance(scheduler, CyclicLR):
        most = scheduler.max_lrs[0] if lr is None else lr
        base = _divided(most, scheduler.max_lrs[0], scheduler.base_lrs[0])
        scheduler.max_lrs = [*scheduler.max_lrs, most]
        if scheduler.cycle_momentum:
            scheduler.base_momentums = [*scheduler.base_momentums, scheduler.base_momentums[0]]
            scheduler.max_momentums = [*scheduler.max_momentums, scheduler.max_momentums[0]]
    if getattr(scheduler, "cycle_momentum", False):
        group.update({name: other[name] for name in _CYCLED if name in other})
        if "betas" in other:
            group["betas"] = (other["betas"][0], *group["betas"][1:])
    if isinstance(scheduler, SWALR):
        group["swa_lr"] = other["swa_lr"]
    group.setdefault("initial_lr", base)
    if hasattr(scheduler, "base_lrs"):
        scheduler.base_lrs = [*scheduler.base_lrs, base]
    if hasattr(scheduler, "lr_lambdas"):
        scheduler.lr_lambdas = [*scheduler.lr_lambdas, _only_function(scheduler)]


def _only_function(scheduler: Any) -> Any:
    if len({id(function) for function in scheduler.lr_lambdas}) > 1:
        raise ModelError(
            f"{type(scheduler).__name__} has a function for each parameter group, and none for "
            "the layers that Unfreeze lets train",
            do="give the optimizer a parameter group with these layers, and leave out lr",
        )
    return scheduler.lr_lambdas[0]


def _divided(rate: Any, whole: Any, part: Any) -> Any:
    if not part:
        return part
    ratio = whole / part
    short = float(f"{ratio:.12g}")
    return rate / (short if whole / short == part else ratio)


def _rate_by_now(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    groups = [
        {name: _apart(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    now, group = optimizer.param_groups[0]["lr"], optimizer.param_groups[-1]
    for one in groups:
        one["lr"] = _apart(one["initial_lr"])
    copied = _copied(scheduler, SimpleNamespace(param_groups=groups, step=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides the warning that no optimizer stepped in between
        try:
            steps = _steps(scheduler)
            _start(copied)
            for _ in range(steps):
                copied.step()
        except Exception:  # a custom schedule that cannot be run again
            groups[0]["lr"] = None
    if groups[0]["lr"] == now:
        return groups[-1]["lr"]
    first = optimizer.param_groups[0]["initial_lr"]
    return group["initial_lr"] * (now / first) if first else group["lr"]


def _apart(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value


def _copied(scheduler: Any, optimizer: Any) -> Any:
    copied = copy.copy(scheduler)
    copied.optimizer = optimizer
    if hasattr(copied, "_schedulers"):
        copied._schedulers = [_copied(inner, optimizer) for inner in copied._schedulers]
    return copied


def _start(scheduler: Any) -> None:
    if not hasattr(scheduler, "_schedulers"):
        scheduler.last_epoch = -1
        scheduler._initial_step()
    elif hasattr(scheduler, "_milestones"):
        scheduler.last_epoch = 0
        for leaf in _leaves(scheduler):
            leaf.last_epoch = -1
        _start(scheduler._schedulers[bisect_right(scheduler._milestones, 0)])
    else:
        for inner in scheduler._schedulers:
            _start(inner)


def _steps(scheduler: Any) -> int:
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    return max(map(_steps, scheduler._schedulers))
