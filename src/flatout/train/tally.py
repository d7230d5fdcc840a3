"""The mean loss of an epoch, without reading the device in each step."""

from __future__ import annotations

from typing import Any

import torch

_FOLD = 256


class Tally:
    """Collects (mean, weight) of steps and folds them into one weighted mean in float64."""

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._weights: list[torch.Tensor | float] = []
        self._total: torch.Tensor | float = 0.0
        self._weight: torch.Tensor | float = 0.0

    def add(self, value: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Take one step's mean and the weight of that mean; nothing is read."""
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= _FOLD:
            self._fold()

    def mean(self) -> float:
        """The weighted mean so far; waits for the device. NaN where nothing was counted."""
        self._fold()
        weight = float(self._weight)
        return float(self._total) / weight if weight else float("nan")

    def reset(self) -> None:
        """Begin anew."""
        self.__init__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Total and weight so far."""
        self._fold()
        return {"total": float(self._total), "weight": float(self._weight)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self.reset()
        self._total, self._weight = state["total"], state["weight"]

    def _fold(self) -> None:
        if not self._values:
            return
        values = torch.stack(self._values).double()
        if any(torch.is_tensor(w) for w in self._weights):
            weights = torch.stack(
                [
                    torch.as_tensor(w, dtype=torch.float64, device=values.device)
                    for w in self._weights
                ]
            )
        else:
            weights = torch.tensor(self._weights, dtype=torch.float64, device=values.device)
        self._total = self._total + (values * weights).sum()
        self._weight = self._weight + weights.sum()
        self._values.clear()
        self._weights.clear()
