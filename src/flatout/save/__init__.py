"""Checkpoints, model files and export: whole or absent, and never code in a file."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
