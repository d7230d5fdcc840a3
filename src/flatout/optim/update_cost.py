"""The duration of an optimizer's update, measured before the first one is made.

The measurement steps a second optimizer of the same class and options, with tensors of the same
shapes, so that weights and state stay as they are. A class of the user's own may hold anything,
even other optimizers, so it is not copied. For such a class, SGD with momentum gives a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from time import perf_counter

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from flatout.measure import finish_device
from flatout.optim.adapter import optimizer_adapter

# Most parameter values that are stepped. For a larger model, the result is scaled up.
_MOST = 1 << 21
# Packages whose optimizers hold only their groups and state, so that a second one is soon made.
_KNOWN = ("torch.optim", "flatout.optim", "keras.src")


def seconds_of_update(
    optimizer: torch.optim.Optimizer,
    by_rows: Collection[torch.Tensor] = (),
    clock: Callable[[], float] = perf_counter,
    most: int = _MOST,
) -> float:
    """Return the approximate seconds of a dense update of all parameters that train.

    Args:
        optimizer: the optimizer, which stays unchanged.
        by_rows: parameters that the optimizer does not step whole.
        clock: returns seconds.
        most: the most parameter values to measure. The result is scaled up to all values.

    Returns:
        0.0 if the seconds are unknown: for steps without dense gradients, and if a hook runs around
        every optimizer's step. For classes that are not of torch, Keras or Flatout, a lower bound.
    """
    is_watched = (
        torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks
    )
    if is_watched:
        return 0.0
    left = set(map(id, by_rows))
    trained = [
        [p for p in group["params"] if p.requires_grad and id(p) not in left]
        for group in optimizer.param_groups
    ]
    numbers: int = sum(p.numel() for own in trained for p in own)
    if not numbers:
        return 0.0
    share = min(1.0, most / numbers)
    try:
        made = [[_like(p, share) for p in own] for own in trained]
        other = _second(optimizer, made)
        other.step()  # creates its state
        finish_device()
        began = clock()
        other.step()
        finish_device()
        took = clock() - began
    except Exception:  # the run's own update will report the error
        return 0.0
    kept = sum(p.numel() for own in made for p in own)
    return took * numbers / kept


def _like(parameter: torch.Tensor, share: float) -> nn.Parameter:
    shape = list(parameter.shape)
    if shape:
        shape[0] = math.ceil(shape[0] * share)
    result = nn.Parameter(torch.ones(shape, dtype=parameter.dtype, device=parameter.device))
    result.grad = torch.ones_like(result)
    return result


def _second(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Sequence[nn.Parameter]]
) -> torch.optim.Optimizer:
    adapter = optimizer_adapter(optimizer)
    room = ".".join(type(adapter.given).__module__.split(".")[:2])
    if room in _KNOWN:
        return adapter.second(parameters)
    return torch.optim.SGD([p for own in parameters for p in own], lr=0.0, momentum=0.9)
