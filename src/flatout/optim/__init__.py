"""The optimizer step: gated against bad numbers, fused where that is allowed; large batches."""

from flatout.models.keras.optimizer import KerasOptimizer
from flatout.optim.fused import can_fuse, defuse, fuse
from flatout.optim.lamb import Lamb
from flatout.optim.lars import Lars
from flatout.optim.rates import LrRule, LrScale
from flatout.optim.several import Optimizers, as_tuple
from flatout.optim.update import Update

__all__ = [
    "KerasOptimizer",
    "Lamb",
    "Lars",
    "LrRule",
    "LrScale",
    "Optimizers",
    "Update",
    "as_tuple",
    "can_fuse",
    "defuse",
    "fuse",
]
