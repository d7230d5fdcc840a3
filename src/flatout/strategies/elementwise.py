"""Refusals of weights and optimizers that cannot be stepped in parts, before any rank trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatout.errors import ModelError
from flatout.models import TableParameter

DDP = "train with world.strategy=ddp"

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Optimizers that step each element independently, so that a part is stepped as in the whole."""


def check_one_device(strategy: str, named: Mapping[str, nn.Parameter]) -> None:
    places = {str(parameter.device): name for name, parameter in named.items()}
    if len(places) > 1:
        words = ", ".join(f"{name} is on {device}" for device, name in places.items())
        raise ModelError(
            f"{strategy} wants all weights of a rank on one device: {words}",
            do=f"leave out flatout.pin, or {DDP}",
        )


def refusal_of(parameter: nn.Parameter) -> str:
    """Return the reason why a parameter's gradient and state cannot be divided, or ""."""
    if is_lazy(parameter):
        return "has no shape before the first batch"
    if isinstance(parameter, TableParameter):
        return "is stepped by the rows that a batch has used"
    if not parameter.dim():
        return "is a single number: give it the shape (1,)"
    if not parameter.is_floating_point():
        return f"holds {str(parameter.dtype).removeprefix('torch.')}"
    if parameter._backward_hooks or _after_accumulating(parameter):
        return "has hooks"
    return ""


def _after_accumulating(parameter: Any) -> Any:
    return getattr(parameter, "_post_accumulate_grad_hooks", None)


def check_elementwise(strategy: str, optimizer: torch.optim.Optimizer, known: set[Any]) -> None:
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ModelError(
            f"{strategy} lets ranks step parts of parameters by themselves, and "
            f"{type(optimizer).__name__} is not known to step each element alone",
            do=f"take one of torch's {names}, or {DDP}",
        )
    check_known(optimizer, known)


def check_known(optimizer: torch.optim.Optimizer, known: set[Any]) -> None:
    if not known.issuperset(p for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            f"{type(optimizer).__name__} trains parameters that are not the model's",
            do="give Flatout a model that holds all that is trained",
        )


def check_laid_out(
    strategy: str, parameters: Iterable[torch.Tensor], laid_out: Collection[torch.Tensor]
) -> None:
    """Refuse parameters that an optimizer got after its weights were distributed over the ranks."""
    if not all(parameter in laid_out for parameter in parameters):
        raise ModelError(
            f"{strategy} lays out what the optimizers train before the first step, and parameters "
            "were added since",
            do=f"give the optimizer all parameters that will train from the start, or {DDP}",
        )
