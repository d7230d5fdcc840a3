"""The optimiser step: gated against bad numbers, fused where that is allowed."""

from flatout.optim.fused import can_fuse, defuse, fuse
from flatout.optim.update import Update

__all__ = ["Update", "can_fuse", "defuse", "fuse"]
