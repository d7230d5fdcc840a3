"""One rank: what it has found is the sum of all."""

from __future__ import annotations

from typing import Any

from flatout.strategies.ddp import Sums


class Alone:
    """Takes the place of a strategy of several ranks, with nothing to add up."""

    def __init__(self) -> None:
        self._own = Sums(0.0, 0.0, 0.0)

    def arm(self, own: Sums, samples: float, scaler: Any = None) -> None:
        """The next backward completes the gradients, of which these are the sums."""
        self._own = own

    def disarm(self) -> None:
        """That backward has failed."""

    def finish(self) -> Sums:
        """The sums of all ranks."""
        return self._own
