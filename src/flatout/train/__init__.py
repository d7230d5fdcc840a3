"""Training: one step, Loop, Trainer and its verbs, and what `auto` decides."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
