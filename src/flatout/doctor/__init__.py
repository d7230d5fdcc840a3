"""What holds a job back, and what to do about it."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
