"""Refusals of models and optimizers that parameter servers cannot step, before any rank trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatout.errors import ModelError, WorldError
from flatout.strategies.elementwise import check_elementwise, check_one_device, refusal_of
from flatout.strategies.servers.layout import is_dense

_NAME = "world.strategy=parameter_server"


def check_served(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], servers: int, ranks: int
) -> None:
    """Refuse models and optimizers whose weights cannot be divided among servers."""
    check_one_device(_NAME, dict(model.named_parameters()))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        check_elementwise(_NAME, optimizer, set(names))
        own = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in own:
            why = refusal_of(parameter)
            if not why and not is_dense(parameter):
                why = "has gaps in its memory"
            if why:
                raise ModelError(
                    f"{_NAME} cannot share out {names[parameter]}, which {why}",
                    do="train with world.strategy=ddp",
                )
        kinds = {str(p.dtype).removeprefix("torch.") for p in own}
        if len(kinds) > 1:
            raise ModelError(
                f"{_NAME} wants all weights of an optimizer in one dtype, found "
                + " and ".join(sorted(kinds)),
                do="convert the model, as with model.float(), or train with world.strategy=ddp",
            )
        numbers = sum(p.numel() for p in own)
        if numbers < servers:
            raise WorldError(
                f"world.servers={servers}, and an optimizer has {numbers} numbers to share out, of "
                "which each server steps one at least",
                do=f"take {numbers} servers at most" if numbers else "give it parameters",
            )
    if len({p.dtype for o in optimizers for g in o.param_groups for p in g["params"]}) > 1:
        raise ModelError(
            f"{_NAME} wants the weights of all optimizers in one dtype",
            do="convert the model, as with model.float(), or train with world.strategy=ddp",
        )
    if servers > ranks:
        raise WorldError(
            f"world.servers={servers}, and servers are ranks of the job, of which there are "
            f"{ranks}",
            do=f"take {ranks} servers at most, or start more ranks",
        )


def check_spare(spare: int, servers: int, ranks: int) -> None:
    """Refuse spare workers if several servers could disagree about the late gradients."""
    if spare and servers > 1:
        raise WorldError(
            f"world.spare_workers={spare} with world.servers={servers}: each server might find "
            "other gradients late",
            do="take one server",
        )
    if spare >= ranks:
        raise WorldError(
            f"world.spare_workers={spare} of {ranks} ranks leaves no gradient to wait for",
            do=f"take {ranks - 1} at most",
        )
