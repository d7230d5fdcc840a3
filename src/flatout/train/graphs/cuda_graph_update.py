"""The update of a small model as part of a CUDA graph: clipping, the check for NaN, fused kernels.

The operations come from `optim/update.py` and wait for nothing. A graph has recorded the
optimizer's options, such as its learning rate, and the addresses of parameters and states. If one
of these changes, the step is recorded again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flatout.optim import Update
from flatout.train.step import Stepper

_OTHERS = ("params", "fused", "foreach")
# Maximum bytes of weights and states that are copied for comparison. In larger models the update is
# a small part of a step.
_MOST_BYTES = 1 << 26


def rates_of(stepper: Stepper) -> list[dict[str, Any]]:
    """Return the options of each parameter group, without the choice of kernels."""
    return [
        {name: value for name, value in group.items() if name not in _OTHERS}
        for part in stepper.joint.update.parts
        for group in part.optimizer.param_groups
    ]


class RecordedUpdate:
    """The update of one optimizer with fused kernels."""

    def __init__(self, update: Update) -> None:
        self._update, self._part = update, update.parts[0]
        self._options = self._options_now()
        self._states = [
            (state, name, value)
            for state in self._part.optimizer.state.values()
            for name, value in state.items()
            if torch.is_tensor(value)
        ]
        assert update.flag is not None
        self._moved = [*self._part.own, *(value for _, _, value in self._states), update.flag]
        self._before: list[torch.Tensor] = []
        self._wanted: list[torch.Tensor] = []

    @classmethod
    def of(cls, update: Update) -> RecordedUpdate | None:
        """Return the recorded form of an Update; None if it waits for the device or is large."""
        part = update.parts[0]
        is_one = len(update.parts) == 1 and update.across is None and update.flag is not None
        if not is_one or part.direct is None or part.hooked():
            return None
        recorded = cls(update)
        taken = sum(tensor.nbytes for tensor in recorded._moved)
        return recorded if taken <= _MOST_BYTES else None

    def _options_now(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._part.optimizer.param_groups
        ]

    @contextmanager
    @torch.no_grad()
    def put_back(self) -> Iterator[None]:
        """Restore weights and states at the end of this context."""
        self._before = [tensor.clone() for tensor in self._moved]
        try:
            yield
        finally:
            torch._foreach_copy_(self._moved, self._before)
            self._before, self._wanted = [], []

    def make(self) -> None:
        """Clip, check and apply the gradients."""
        self._update()

    @torch.no_grad()
    def rehearse(self) -> None:
        """Make the update, keep its result for comparison, and undo it."""
        self.make()
        self._wanted = [tensor.clone() for tensor in self._moved]
        torch._foreach_copy_(self._moved, self._before)

    @torch.no_grad()
    def share(self) -> float:
        """Return the difference from the rehearsed update, as a fraction of a step's change."""
        differing = changed = 0.0
        for old, wanted, now in zip(self._before, self._wanted, self._moved, strict=True):
            differing += float((now.double() - wanted.double()).norm()) ** 2
            changed += float((wanted.double() - old.double()).norm()) ** 2
        return (differing / changed) ** 0.5 if changed else float(differing > 0)

    def is_current(self) -> bool:
        """Return whether options and states are those that were recorded."""
        return (
            not self._part.is_stale()
            and not self._part.hooked()
            and self._options_now() == self._options
            and all(state.get(name) is value for state, name, value in self._states)
        )

    def tell(self) -> None:
        """Mark the optimizer as stepped."""
        # torch's schedulers check this to see that the optimizer stepped before them.
        self._part.optimizer._opt_called = True  # type: ignore[attr-defined]
