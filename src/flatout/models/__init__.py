"""What a model is to Flatout: facts about it, and changes that leave its result alone."""

from flatout.models.adapter import (
    adapter_of,
    facts_of,
    find_rewrites,
    is_batch_coupled,
    load_weights,
    weights_of,
)
from flatout.models.keras.model import modules_of
from flatout.models.recompute import recompute_activations
from flatout.models.rewrites import Rewrite
from flatout.models.torch_model import uses_convolution
from flatout.models.weights import own_names

__all__ = [
    "Rewrite",
    "adapter_of",
    "facts_of",
    "find_rewrites",
    "is_batch_coupled",
    "load_weights",
    "modules_of",
    "own_names",
    "recompute_activations",
    "uses_convolution",
    "weights_of",
]
