"""Reductions: ways to sum the gradients of all ranks."""

from flatout.strategies.reductions.choose import (
    check_reduction,
    reduction_among,
    reduction_of,
)
from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.strategies.reductions.shared import Shared

__all__ = [
    "Flat",
    "Reduction",
    "Shared",
    "check_reduction",
    "reduction_among",
    "reduction_of",
]
