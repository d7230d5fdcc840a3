"""What a step leaves, and what makes steps as graphs of operators instead of one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from flatout.data import Batch


class Done(NamedTuple):
    """What one optimizer step leaves: mean loss, the weight of that mean, and times in ns."""

    loss: torch.Tensor
    weight: torch.Tensor | float
    forward: int
    backward: int
    sync: int
    optimizer: int


class MakesCudaGraphs(Protocol):
    """Makes steps as CUDA graphs; cuda_graph.py says what these are."""

    @property
    def why(self) -> str:
        """Why no step is recorded under the present settings; "" while it may be."""

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by a graph where there is one."""

    def objection(self, compute: Any, batches: Sequence[Batch]) -> str:
        """Why a step is none that a graph could make; "" where nothing is known."""


class MakesGraphs(Protocol):
    """Makes steps as one compiled graph; capture.py says what these are.

    Attributes:
        is_asked: whether steps are to be captured, not only tried so.
        why: why no step is captured; "" while it may be.
    """

    is_asked: bool
    why: str

    def __call__(
        self, eager: Callable[[], Done], compute: Any, batches: Sequence[Batch], step: int
    ) -> Done:
        """Make a step, by the graph where it can."""

    @property
    def is_used(self) -> bool:
        """Whether the graph is there."""

    @property
    def compiling(self) -> object | None:
        """What compiles, while it does."""

    def give_up(self, why: str) -> None:
        """Make all steps from here on eagerly."""

    def close(self) -> None:
        """End what goes on beside the training."""
