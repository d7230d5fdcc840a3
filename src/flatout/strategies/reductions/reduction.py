"""The interface of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Flat(NamedTuple):
    """Gradients of some parameters in one piece of memory.

    Attributes:
        values: one-dimensional, real, of any floating dtype, in memory from `memory` for that
            number; of the same length on every rank.
        number: number of the bucket, from 0.
        shapes: rows and columns of each parameter's gradient, in the order of `values`.
        layout: identifies the order of the parameters, for state that is kept longer than the
            training runs.
    """

    values: torch.Tensor
    number: int = 0
    shapes: Sequence[tuple[int, int]] = ()
    layout: str = ""


class Reduction:
    """Sets values to their sum over all ranks, with the same bits on each.

    All ranks make the same calls, in the same order.

    Attributes:
        is_exact: whether it sums in the gradients' own precision, so that other numbers may be
            appended to them.
        carries: whether a part of the gradients is kept for later steps. It then has a state, which
            belongs into checkpoints, and needs the weight of each step.
        weight: the weight of the step over all ranks, in the unit of the gradients' sums.
    """

    is_exact = False
    carries = False
    weight = 1.0

    def memory(
        self, number: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros in one dimension, for a bucket's gradients; no sum may be running."""
        return torch.zeros(length, dtype=dtype, device=device)

    def add_up(self, flat: Flat) -> None:
        """Set `flat.values` to the sum, and return when it is done."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps for later steps."""
        return {}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of all ranks, by rank; the number of ranks may have changed."""
