"""What a model is to Flatout: facts about it, and changes that leave its result alone."""

from flatout.models.facts import facts_of, is_batch_coupled, uses_convolution
from flatout.models.recompute import recompute_activations
from flatout.models.rewrites import Rewrite, find_rewrites
from flatout.models.weights import load_weights, modules_of, own_names, weights_of

__all__ = [
    "Rewrite",
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
