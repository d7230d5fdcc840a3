"""Layouts of parameters, gradients and samples over the World: a file or folder per strategy."""

from flatout.lazy import attach

# Not lazily, or the module would take the place of the function.
from flatout.strategies.rank_rng import rank_rng as rank_rng

__getattr__, __dir__, __all__ = attach(__name__, __file__)
