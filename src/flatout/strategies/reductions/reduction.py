"""The interface of a reduction.

A reduction is written as sequential code. A thread runs its sums while backward continues, in the
order in which they are begun, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch

from flatout.strategies.reductions.work_thread import WorkThread


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
    device = torch.device("cpu")
    _thread: WorkThread | None = None

    def started(self, device: torch.device) -> Self:
        """Start the thread for sums of gradients on a device, and return the reduction."""
        self.device, self._thread = device, WorkThread(device)
        return self

    def memory(
        self, number: int, length: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return zeros in one dimension, for a bucket's gradients; no sum may be running."""
        return torch.zeros(length, dtype=dtype, device=device or self.device)

    def begin(self, flat: Flat) -> Any:
        """Begin a sum in the background, and return an object to `wait()` for."""
        assert self._thread is not None
        return self._thread.begin(lambda: self.add_up(flat))

    def weigh(self, waiting: Any, weight: torch.Tensor) -> None:
        """Set the weight of the step to the value of `weight`, once its sum over ranks is known."""

        def take() -> None:
            waiting.wait()
            self.weight = float(weight)

        assert self._thread is not None
        self._thread.begin(take)

    def close(self) -> None:
        """End the thread after the work that was begun."""
        if self._thread is not None:
            self._thread.close()

    def add_up(self, flat: Flat) -> None:
        """Set `flat.values` to the sum, and return when it is done."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps for later steps."""
        return {}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of all ranks, by rank; the number of ranks may have changed."""
