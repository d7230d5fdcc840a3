"""Refusals of models that cannot be cut into stages, before any rank trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from flatout.errors import DataError, ModelError, RecipeError
from flatout.models import TableParameter, calls_hooks, is_batch_coupled, own_names
from flatout.optim import Lamb, Lars
from flatout.strategies.elementwise import check_known

_OTHERWISE = "train with world.strategy=ddp or fsdp"
_DDP = "train with world.strategy=ddp"


def check_stage_count(stages: int, ranks: int) -> None:
    if stages == 0 or (stages > 1 and ranks % stages == 0):
        return
    may = [number for number in range(2, ranks + 1) if ranks % number == 0]
    *few, most = map(str, may)
    words = f"{', '.join(few)} or {most}" if few else most
    raise RecipeError(
        "a model in one stage is not cut"
        if stages == 1
        else f"{ranks} ranks cannot have {stages} stages in whole copies",
        where=f"world.stages={stages}",
        do=f"set world.stages={words} with {ranks} ranks"
        + (", or train with world.strategy=ddp" if stages == 1 else ""),
    )


def check_stages(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, per_micro_batch: bool
) -> None:
    if not calls_hooks(model):
        raise ModelError(
            "world.strategy=staged cuts the forward of torch modules, and this is Keras'", do=_DDP
        )
    if is_batch_coupled(model) and not per_micro_batch:
        name, norm = next(
            named for named in model.named_modules() if isinstance(named[1], _BatchNorm)
        )
        raise ModelError(
            f"layer {name} ({type(norm).__name__}) takes its statistics over the whole "
            "batch, and world.strategy=staged sends micro-batches through the model",
            do="take GroupNorm or LayerNorm, freeze it with flatout.freeze, say "
            f"world.batch_statistics=per_micro_batch to let them differ, or {_OTHERWISE}",
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ModelError(
                f"{name} has sparse gradients, which world.strategy=staged does not clip",
                do=f"make it with sparse=False, or {_DDP}",
            )
    named = dict(model.named_parameters())
    own = own_names(model, named)
    for name, parameter in named.items():
        if why := _refusal(parameter):
            raise ModelError(
                f"world.strategy=staged cannot place {own[name]}, which {why}", do=_DDP
            )
    for optimizer in optimizers:
        _check_optimizer(optimizer, set(named.values()))


def too_few_samples(rows: int, copies: int) -> DataError:
    """Return the error for a batch that leaves one sample for the statistics of a layer."""
    share = f", which {copies} copies of the model share," if copies > 1 else ""
    return DataError(
        f"a batch of {rows}{share} leaves one sample for BatchNorm, which needs at least two",
        do='choose another batch size, drop a smaller last batch with .batch(..., last="drop") '
        "or fit(..., drop_last=True), or use GroupNorm or LayerNorm",
    )


def _refusal(parameter: Any) -> str:
    if is_lazy(parameter):
        return "has no shape before the first batch"
    if isinstance(parameter, TableParameter):
        return "is stepped by the rows that a batch has used"
    if parameter.device.type != "cpu":
        return f"is on {parameter.device}: it runs on CPUs alone so far"
    # Hooks would get the gradient of each micro-batch.
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return "has hooks"
    return ""


def _check_optimizer(optimizer: torch.optim.Optimizer, known: set[Any]) -> None:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") and kind not in (Lamb, Lars):
        raise ModelError(
            f"world.strategy=staged lets each rank step the weights of its layers, and "
            f"{kind.__name__} is not known to step each weight by itself",
            do=f"take one of torch's optimizers, Lars or Lamb, or {_DDP}",
        )
    check_known(optimizer, known)
