"""The optimizer step: gated against bad numbers, fused where that is allowed; large batches."""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
