"""What steps of single rows read and write."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Table(NamedTuple):
    """A table with its optimizer's state.

    Attributes:
        weights: float32 of shape (rows, width), contiguous, as are the others.
        first: Adam's mean, the momentum of SGD and RMSprop, Adagrad's sum; or None.
        second: the squares of Adam and RMSprop; or None.
        last: int32 of shape (rows,), the step that each row is at.
        epsilon: that the rule adds to the root.
    """

    weights: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None
    last: torch.Tensor
    epsilon: float
