"""What a strategy is asked around each step; what it does not need, it leaves as it is here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flatout.strategies.reductions import Beside

Tensors = Sequence[torch.Tensor]


class Sums(NamedTuple):
    """What travels with the gradients: of one rank, or of all together.

    Attributes:
        total: sum of the losses.
        weight: sum of their weights.
        votes: how many ranks want to stop.
    """

    total: torch.Tensor | float
    weight: torch.Tensor | float
    votes: torch.Tensor | float


class Strategy:
    """Makes a step one of all ranks; this one is for a single rank, with nothing to add up.

    Around a step: `before_step`, `arm` before the backward that completes the gradients, `finish`
    behind it, and `after_step` when the weights have changed.

    Attributes:
        steps_apart: whether ranks step alone and are alike only where they meet: then losses are
            a rank's own, and all call `meet` before they compare, evaluate or save.
        reduction: adds up gradients; None where none is used.
    """

    steps_apart = False
    reduction: Beside | None = None

    def __init__(self) -> None:
        self._own = Sums(0.0, 0.0, 0.0)

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """A step begins, before anything changes.

        Args:
            turn: which of the job's optimizers step, from 1.
            parameters: what they train, in the same order on every rank; the same object while it
                is the same.
        """

    def arm(self, own: Sums, samples: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """The next backward completes the gradients.

        Args:
            own: this rank's part of the sums.
            samples: what the loss was divided by.
            scaler: what the loss was scaled by, if it was.
        """
        self._own = own

    def disarm(self) -> None:
        """That backward has failed, and the gradients are computed again from the beginning."""

    def finish(self) -> Sums:
        """Wait until the gradients are those of the step; what travelled with them."""
        return self._own

    def after_step(self) -> bool:
        """The weights have changed; returns whether a rank wants to stop, where ranks meet now."""
        return False

    def meet(self) -> bool:
        """Make all ranks alike; returns whether one wants to stop. All of them call it."""
        return False

    def renew(self) -> None:
        """Gradients may be of another kind from the next step on."""

    def state_dict(self) -> dict[str, Any]:
        """What later steps need besides weights and optimizers; the ranks have met."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, of this strategy or another one."""

    def close(self) -> None:
        """Take off what was put on the model's parameters."""
