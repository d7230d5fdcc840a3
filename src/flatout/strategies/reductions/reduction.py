"""The interface of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Flat(NamedTuple):
    """Gradients of some parameters in one piece of memory.

    Attributes:
        values: one dimension, real, of any floating dtype, in what `memory` gave for that number;
            of the same length on every rank.
        number: of the bucket, from 0.
        shapes: rows and columns of each parameter's gradient, as they lie in `values`.
        layout: tells what lies where, for what is kept longer than the training runs.
    """

    values: torch.Tensor
    number: int = 0
    shapes: Sequence[tuple[int, int]] = ()
    layout: str = ""


class Reduction:
    """Makes values the sum of those of all ranks, with the same bits on each.

    All ranks make the same calls, in the same order.

    Attributes:
        is_exact: whether it adds up in the gradients' own precision, so that other numbers may
            travel with them.
        carries: whether a part of the gradients is kept for later steps. It then has a state,
            which belongs into checkpoints, and is told what each step weighs.
        weight: of the step, all ranks together, in the unit of the gradients' sums.
    """

    is_exact = False
    carries = False
    weight = 1.0

    def memory(
        self, number: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Zeros in one dimension, for a bucket's gradients; no sum may be under way."""
        return torch.zeros(length, dtype=dtype, device=device)

    def add_up(self, flat: Flat) -> None:
        """Return when `flat.values` is the sum."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps for later steps."""
        return {}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from what all ranks kept, by rank; then there may have been another number."""
