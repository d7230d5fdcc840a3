"""The mean loss of an epoch, without reading the device in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flatout.world import World

TINY = 1e-12
_FOLD = 256


class RunningMean:
    """Collects (mean, weight) of steps and combines them into a weighted mean in float64."""

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | float] = []
        self._total: torch.Tensor | float = 0.0
        self._weight: torch.Tensor | float = 0.0
        self._last: torch.Tensor | float = float("nan")

    @property
    def last(self) -> float:
        """The value that was added last; NaN before the first value. Waits for the device."""
        return float(self._last)

    def add(self, value: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Add a step's mean and its weight, one number each, without waiting for the device."""
        self._values.append(value)
        self._weights.append(weight)
        self._last = value
        if len(self._values) >= _FOLD:
            self._fold()

    def take(self, value: Any, samples: int) -> None:
        """Add a batch's mean over `samples`, or its (sum, weight), without a wait."""
        if isinstance(value, tuple):
            total, weight = value
            self.add(torch.as_tensor(total).detach() / not_zero(weight), weight)
        else:
            self.add(torch.as_tensor(value).detach(), samples)

    def mean(self) -> float:
        """Return the weighted mean so far; waits for the device. NaN where nothing was counted."""
        return mean_of([self.state_dict()])

    def reset(self) -> None:
        """Delete all values."""
        self._values.clear()
        self._weights.clear()
        self._total = self._weight = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return total and weight so far."""
        self._fold()
        return {"total": float(self._total), "weight": float(self._weight)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.reset()
        self._total, self._weight = state["total"], state["weight"]

    def share(self, world: World) -> None:
        """Set the mean over all ranks on every rank; all ranks call it."""
        result = world.gather(self.state_dict(), "mean loss of all ranks")
        self._total, self._weight = (
            sum(state[name] for state in result) / world.size for name in ("total", "weight")
        )

    def _fold(self) -> None:
        if not self._values:
            return
        device = self._values[0].device
        values = _column(self._values, device)
        weights = _column(self._weights, device)
        self._total = self._total + (values * weights).sum()
        self._weight = self._weight + weights.sum()
        self._values.clear()
        self._weights.clear()


def not_zero(weight: torch.Tensor | float) -> torch.Tensor | float:
    """Return a nonzero divisor, so that nothing is added where nothing was counted."""
    return weight.clamp_min(TINY) if torch.is_tensor(weight) else max(weight, TINY)


def mean_of(states: Sequence[Mapping[str, float]]) -> float:
    """Return the weighted mean over several states; NaN where nothing was counted."""
    weight = sum(state["weight"] for state in states)
    return sum(state["total"] for state in states) / weight if weight else float("nan")


def _column(numbers: list[Any], device: torch.device) -> torch.Tensor:
    if not any(torch.is_tensor(number) for number in numbers):
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    tensors = [
        n if torch.is_tensor(n) else torch.tensor(n, dtype=torch.float64, device=device)
        for n in numbers
    ]
    return torch.stack([t if t.dim() == 0 else t.reshape(()) for t in tensors]).double()
