"""Which models take `Features` in place of their inputs; frozen/cut.py makes that so."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn


class AppliedCut(Protocol):
    """A cut that lets its model take what its frozen prefix gave."""

    def rest(self, features: Any) -> Any:
        """The model's outputs for features."""

    def is_current(self) -> bool:
        """Whether the frozen part is what it was."""


applied: WeakKeyDictionary[nn.Module, AppliedCut] = WeakKeyDictionary()
"""The cut of each model that has one, until it is taken off."""
