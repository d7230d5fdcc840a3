"""Hashes of the weights and gradients of replicas, to compare them between ranks.

The hashes are computed once, before the first step, and only with several ranks.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

from flatout.observe.model_facts import local, some_of
from flatout.observe.observation import Model

# Number of elements of each tensor that are hashed.
_SAMPLE = 1024


def look_at_replica(module: Any, facts: Model) -> None:
    """Fill in the hashes of the weights and of the gradients that this rank steps with."""
    if not has_peers():
        return
    stepped = [tensor for tensor in module.parameters() if tensor.grad is not None]
    parts = [tensor for tensor in stepped if local(tensor) is not tensor]
    gradients = [tensor.grad for tensor in stepped]
    # Shards differ on purpose, and zero gradients are equal even if they were not reduced.
    if parts or not any(bool(gradient.any()) for gradient in gradients if not gradient.is_sparse):
        return
    facts.first_weights = number_of(stepped)
    facts.first_gradients = number_of(gradients)


def random_bytes(torch: Any) -> bytes:
    """Return torch's random states, with those of initialized GPUs; this waits for no kernel."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return b"".join(state.cpu().numpy().tobytes() for state in states)


def has_peers() -> bool:
    """Return whether this process has joined a process group of several ranks."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


def number_of(tensors: list[Any]) -> int:
    """Return a hash of a sample of each tensor's values; this reads them from their device."""
    number = 0
    for tensor in tensors:
        values = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        sample = some_of(values, _SAMPLE).double().cpu()
        number = zlib.crc32(sample.numpy().tobytes(), number)
    return number
