"""The models that take `Features` in place of their inputs (see frozen/cut.py)."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn


class AppliedCut(Protocol):
    """A cut whose model now takes the outputs of its frozen prefix as input."""

    def rest(self, features: Any) -> Any:
        """Return the model's outputs for features."""

    def is_current(self) -> bool:
        """Return whether the frozen part is unchanged."""


applied: WeakKeyDictionary[nn.Module, AppliedCut] = WeakKeyDictionary()
"""The cut of each model that takes features, until its removal."""
