"""Steps of single rows of a table by Keras' optimizers.

Keras' formulas differ from torch's (src/backend/torch/optimizers of Keras):

- Adam adds epsilon to the root of the uncorrected squares.
- RMSprop and Adagrad add epsilon to the squares, under the root.
- The momentum of SGD and RMSprop contains past learning rates, and SGD's is subtracted.
- Weight decay is decoupled in all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatout.kernels import Step, in_float32
from flatout.models.table_parameter import Reader, unwatch_table, watch_table

ROW_RULES = {
    "Adam": "adam", "AdamW": "adam", "SGD": "sgd", "RMSprop": "rmsprop", "Adagrad": "adagrad",
}  # fmt: skip
"""By the optimizer's name, the rule of `flatout.kernels` that steps rows of a table."""
# Names of Keras' lists that hold the state of a rule.
_SLOTS = {
    "adam": ("_momentums", "_velocities"),
    "sgd": ("momentums", None),
    "rmsprop": ("_momentums", "_velocities"),
    "adagrad": ("_accumulators", None),
}


class KerasRule:
    """The rule by which a Keras optimizer steps one table (see `TorchRule` in optim).

    Args:
        optimizer: a `KerasOptimizer`.
        group: the table's parameter group.
        weight: the table.

    Attributes:
        name: one of `flatout.kernels.table_rows.RULES`.
    """

    def __init__(self, optimizer: Any, group: dict[str, Any], weight: nn.Parameter) -> None:
        self._optimizer, self._group, self._weight = optimizer, group, weight
        self._keras = optimizer.keras
        self.name = ROW_RULES[type(self._keras).__name__]
        self._decays = optimizer.decays(weight)
        self._reader: Reader | None = None
        self._watched: list[nn.Parameter] = []

    @property
    def epsilon(self) -> float:
        """Adam's epsilon, which is added to the root. For other rules `step` returns epsilon."""
        return float(self._keras.epsilon) if self.name == "adam" else 0.0

    @property
    def decay(self) -> None:
        """None, because Keras' weight decay is decoupled from gradients."""
        return None

    def shares(self, other: Any) -> bool:
        return (
            isinstance(other, KerasRule)
            and other._group is self._group
            and other._decays == self._decays
        )

    def state(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return Keras' own variables: the mean, momentum or sum, and the squares."""
        first, second = (self._optimizer.slot(self._weight, name) for name in _SLOTS[self.name])
        slots = [slot for slot in (first, second) if slot is not None]
        if self._reader is not None and [*map(id, slots)] != [*map(id, self._watched)]:
            self._unwatch()
            for slot in slots:
                watch_table(slot, self._reader)
            self._watched = slots
        return first, second

    def count(self) -> int:
        """Return Keras' step count, which also grows when the table has no gradient."""
        return int(self._keras._iterations.value)

    def step(self, count: int) -> Step:
        """Return the numbers of step `count`, rounded as in Keras' own step on torch."""
        keras = self._keras
        rate = torch.tensor(self._optimizer.rate_of(self._group), dtype=torch.float32)
        keep = float(1 - keras.weight_decay * rate) if self._decays else 1.0
        if self.name == "adam":
            beta1, beta2 = (torch.tensor(beta) for beta in (keras.beta_1, keras.beta_2))
            corrected = torch.sqrt(1 - beta2**count) / (1 - beta1**count)
            first, second = in_float32(1 - keras.beta_1), in_float32(1 - keras.beta_2)
            return Step(
                float(rate * corrected), 1.0, 1 - first, float(beta2), keep,
                first_rest=first, second_rest=second,
            )  # fmt: skip
        if self.name == "adagrad":
            return Step(float(rate), keep=keep, within=keras.epsilon)
        step = Step(float(rate), first=in_float32(keras.momentum), keep=keep)
        if self.name == "sgd":
            if not keras.momentum:
                return step
            # Keras' momentum is the amount that is added to a weight.
            return step._replace(rate=-1.0, scale=-step.rate, nesterov=bool(keras.nesterov))
        rho, rest = in_float32(keras.rho), in_float32(1 - keras.rho)
        step = step._replace(within=keras.epsilon, second=rho, second_rest=rest)
        return step._replace(rate=1.0, scale=step.rate) if keras.momentum else step

    def lower(self) -> None:
        """Return None: Keras' tables are float32."""

    def count_step(self) -> None:
        """Do nothing: Keras counts in the step of all other variables."""

    def attach(self, reader: Reader) -> None:
        """Keep Keras from stepping the table; other reads of its state call the reader first."""
        self._reader = reader
        self._optimizer.by_rows.add(self._weight)

    def detach(self) -> None:
        self._reader = None
        self._unwatch()
        self._optimizer.by_rows.discard(self._weight)

    def _unwatch(self) -> None:
        for slot in self._watched:
            unwatch_table(slot)
        self._watched = []
