"""Diagnosis of a training job: what slows or endangers it, and how to fix that."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
