"""Refusals of models that cannot be sharded by parts, before any rank trains."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flatout.errors import ModelError, WorldError
from flatout.models import calls_hooks, own_names
from flatout.strategies.elementwise import DDP, check_one_device, refusal_of
from flatout.world import World

_WRAPPERS = (DataParallel, DistributedDataParallel, FSDPModule)


def check_layout(model: nn.Module) -> None:
    if not calls_hooks(model):
        raise ModelError(
            "world.strategy=fsdp gathers weights around the calls of torch's modules, and a Keras "
            "model within one calls its layers in another way",
            do=f"give Flatout the Keras model itself, or {DDP}",
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
                do=f"make it with sparse=False, or {DDP}",
            )
    named = dict(model.named_parameters())
    own = own_names(model, named)
    for name, parameter in named.items():
        if why := refusal_of(parameter):
            raise ModelError(f"world.strategy=fsdp cannot cut {own[name]}, which {why}", do=DDP)
    kinds = {p.dtype: own[name] for name, p in named.items() if p.requires_grad}
    if len(kinds) > 1:
        words = ", ".join(f"{name} is {str(k).removeprefix('torch.')}" for k, name in kinds.items())
        raise ModelError(
            f"world.strategy=fsdp wants all weights that train in one dtype: {words}",
            do=f"convert the model, as with model.float(), or {DDP}",
        )
    check_one_device("world.strategy=fsdp", named)


def check_gpus(world: World) -> None:
    """Refuse ranks that share a GPU: it would hold all parts, and gloo has no reduce-scatter."""
    if world.shares_gpus:
        raise WorldError(
            "world.strategy=fsdp gives each rank a part of the model, and these ranks share a GPU, "
            "which would hold all of them",
            do=f"give each rank its own GPU, or {DDP}",
        )
