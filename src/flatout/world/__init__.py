"""The ranks of one job: where this one stands, and what they do together."""

from flatout.lazy import attach

# Not lazily, or the module would take the place of the function.
from flatout.world.place import place as place

__getattr__, __dir__, __all__ = attach(__name__, __file__)
