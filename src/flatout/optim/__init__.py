"""The optimiser step: gated against bad numbers, fused where that is allowed."""

from flatout.optim.fused import can_fuse, defuse, fuse
from flatout.optim.keras_optimizer import KerasOptimizer
from flatout.optim.update import Update

__all__ = ["KerasOptimizer", "Update", "can_fuse", "defuse", "fuse"]
