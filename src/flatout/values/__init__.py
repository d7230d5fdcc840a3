"""Nested values as tensors and JSON, never as pickle, for files and messages between ranks."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
