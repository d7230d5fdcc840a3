"""The tensors that steps of single rows read and write."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LowerBits(NamedTuple):
    """The lower 16 bits of a bfloat16 table's values; the table has the upper 16 bits.

    Attributes:
        weights: bfloat16 of shape (rows, width), contiguous, whose bits are no numbers of their
            own; as are the others.
        first: lower bits of the table's `first`, or None.
        second: lower bits of the table's `second`, or None.
    """

    weights: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None


class Table(NamedTuple):
    """A table with its optimizer's state.

    Attributes:
        weights: float32 of shape (rows, width), contiguous, as are the others; bfloat16 if `lower`
            is set.
        first: Adam's mean, the momentum of SGD and RMSprop, Adagrad's sum; or None.
        second: the squares of Adam and RMSprop; or None.
        last: int32 of shape (rows,), the last step that each row has made.
        epsilon: the constant that the rule adds to the root.
        lower: lower halves of all values; None for float32.
    """

    weights: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None
    last: torch.Tensor
    epsilon: float
    lower: LowerBits | None = None


def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of two bfloat16 halves of the same shape."""
    low = lower.view(torch.int16).to(torch.int32) & 0xFFFF
    return (upper.view(torch.int16).to(torch.int32) << 16 | low).view(torch.float32)


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 16 bits of float32 numbers, each as bfloat16 of their shape."""
    bits = values.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), low.view(torch.bfloat16)
