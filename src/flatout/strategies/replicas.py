"""A check that all ranks have the same model."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from flatout.errors import WorldError
from flatout.models import adapter_of, calls_hooks
from flatout.world import World


def check_replicas(model: nn.Module, world: World, when: str, *, every: int = 1) -> None:
    """Compare the weights and buffers that ranks have in common, bit for bit.

    For a Keras model these are its weights, statistics and the states of its seed generators.

    Args:
        every: distance of ranks with the same tensors; 1 if all ranks have the same.

    Raises:
        WorldError: on every rank, naming the first tensor that differs and the ranks.
    """
    if world.size == 1:
        return
    tensors = adapter_of(model).replicated()
    own = {name: digest_of(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
    seed = "torch.manual_seed" if calls_hooks(model) else "keras.utils.set_random_seed"
    digests = world.gather(own, f"comparison of the replicas, {when}")
    names = [set(of_rank) for of_rank in digests]
    for rank, theirs in enumerate(names):
        if theirs != names[rank % every]:
            odd = sorted(theirs ^ names[rank % every])[0]
            raise WorldError(
                f"the models of ranks {rank % every} and {rank} are not the same: {odd} is only in "
                "one of them",
                do="build the same model on every rank",
            )
    for rank, theirs in enumerate(digests):
        beside = digests[rank % every]
        odd = next((name for name in theirs if theirs[name] != beside[name]), None)
        if odd is not None:
            raise WorldError(
                f"the replicas differ {when}: {odd} of rank {rank} is not that of rank "
                f"{rank % every}",
                do=f"call {seed}(...) with the same number on every rank before the model is made"
                if when == "at the start"
                else "look for code that changes weights on one rank alone; go on from the last "
                "checkpoint",
            )


def digest_of(tensor: torch.Tensor) -> str:
    """Return 24 hex digits over the dtype, shape and bits of a tensor."""
    kept = tensor.detach().cpu().contiguous()
    words = f"{kept.dtype} {tuple(kept.shape)}".encode()
    flat = kept.reshape(-1).view(torch.uint8) if kept.numel() else kept.reshape(-1)
    return hashlib.blake2b(words + flat.numpy().tobytes(), digest_size=12).hexdigest()
