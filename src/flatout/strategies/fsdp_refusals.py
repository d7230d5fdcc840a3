"""What cannot be laid over ranks by parts, refused before any of them trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from flatout.errors import ModelError, WorldError
from flatout.models import TableParameter, calls_hooks, own_names
from flatout.world import World

_DDP = "train with world.strategy=ddp"
_WRAPPERS = (DataParallel, DistributedDataParallel, FSDPModule)
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
"""These step each element by itself, so that a part is stepped as the whole would be."""


def check_layout(model: nn.Module) -> None:
    """Refuse models that cannot be laid out."""
    if not calls_hooks(model):
        raise ModelError(
            "world.strategy=fsdp gathers weights around the calls of torch's modules, and a Keras "
            "model within one calls its layers in another way",
            do=f"give Flatout the Keras model itself, or {_DDP}",
        )
    for name, module in model.named_modules():
        if isinstance(module, _WRAPPERS):
            raise ModelError(
                f"{name or 'the model'} is wrapped in {type(module).__name__} already",
                do="give Flatout the model without it: it does the same",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(
                f"{name} has sparse gradients, which world.strategy=fsdp cannot add up",
                do=f"make it with sparse=False, or {_DDP}",
            )
    named = dict(model.named_parameters())
    own = own_names(model, named)
    for name, parameter in named.items():
        if why := refusal_of(parameter):
            raise ModelError(f"world.strategy=fsdp cannot cut {own[name]}, which {why}", do=_DDP)
    kinds = {p.dtype: own[name] for name, p in named.items() if p.requires_grad}
    if len(kinds) > 1:
        words = ", ".join(f"{name} is {str(k).removeprefix('torch.')}" for k, name in kinds.items())
        raise ModelError(
            f"world.strategy=fsdp wants all weights that train in one dtype: {words}",
            do=f"convert the model, as with model.float(), or {_DDP}",
        )
    check_one_device("world.strategy=fsdp", named)


def check_gpus(world: World) -> None:
    """Refuse ranks that share a GPU: all parts would lie there, and gloo cannot scatter its
    sums.
    """
    if world.shares_gpus:
        raise WorldError(
            "world.strategy=fsdp gives each rank a part of the model, and these ranks share a GPU, "
            "which would hold all of them",
            do=f"give each rank its own GPU, or {_DDP}",
        )


def check_one_device(strategy: str, named: Mapping[str, nn.Parameter]) -> None:
    """Refuse a model that a rank has on several devices."""
    places = {str(parameter.device): name for name, parameter in named.items()}
    if len(places) > 1:
        words = ", ".join(f"{name} is on {device}" for device, name in places.items())
        raise ModelError(
            f"{strategy} wants all weights of a rank on one device: {words}",
            do=f"leave out flatout.pin, or {_DDP}",
        )


def refusal_of(parameter: nn.Parameter) -> str:
    """Why its gradient and state cannot be taken apart; nothing where they can."""
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
    """Refuse an optimizer whose step of a part is not that part of its step."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ModelError(
            f"{strategy} lets ranks step parts of parameters by themselves, and "
            f"{type(optimizer).__name__} is not known to step each element alone",
            do=f"take one of torch's {names}, or {_DDP}",
        )
    check_known(optimizer, known)


def check_known(optimizer: torch.optim.Optimizer, known: set[Any]) -> None:
    """Refuse an optimizer that trains something else than the model's parameters."""
    if not known.issuperset(p for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            f"{type(optimizer).__name__} trains parameters that are not the model's",
            do="give Flatout a model that holds all that is trained",
        )
