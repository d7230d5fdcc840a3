"""Steps of single rows of a table by torch's optimizers. models/keras has those of Keras."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from flatout.devices import huge_pages
from flatout.kernels import LowerBits, Step, in_float32
from flatout.models import KerasRule, Reader, has_hooks_of_others
from flatout.optim.by_row import ByRow

State = tuple[torch.Tensor | None, torch.Tensor | None]

_RULES: dict[type, str] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}
# Suffix of the names of lower halves in an optimizer's state.
_LOWER = "_lower_half"
# Options that no kernel has, or under which a row's missed steps depend on more than its state.
_OPTIONS = ("amsgrad", "maximize", "centered", "dampening", "differentiable", "capturable")


def why_all_rows(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return the reason why a group of a torch optimizer cannot step single rows, or ""."""
    if type(optimizer) not in _RULES and not isinstance(optimizer, ByRow):
        return f"{type(optimizer).__name__} steps all rows"
    if is_patched(optimizer) or has_hooks_of_others(optimizer._optimizer_step_pre_hooks):
        return f"code around {type(optimizer).__name__}'s step may read its gradient"
    asked = [name for name in _OPTIONS if group.get(name)]
    if asked:
        return f"{asked[0]} steps all rows"
    numbers = (group["lr"], *group.get("betas", ()))
    if any(map(torch.is_tensor, numbers)):
        return "a learning rate that is a tensor steps all rows"
    return ""


def is_patched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a method `step` was set on the object, except by torch's schedulers."""
    own = optimizer.__dict__.get("step")
    if own is None:
        return False
    wrapped = getattr(own, "__wrapped__", None)
    return not getattr(own, "_wrapped_by_lr_sched", False) or wrapped is not type(optimizer).step


class TorchRule:
    """The rule by which a torch optimizer steps one table; `KerasRule` has the same methods.

    Attributes:
        name: one of `table_rows.RULES`, or "" for an optimizer that steps rows itself.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: nn.Parameter
    ) -> None:
        self._optimizer, self._weight = optimizer, weight
        # load_state_dict makes new groups in the same order, so the index of a group stays right.
        self._number = next(n for n, one in enumerate(optimizer.param_groups) if one is group)
        self.name = _RULES.get(type(optimizer), "")

    @property
    def _group(self) -> dict[str, Any]:
        return self._optimizer.param_groups[self._number]

    @property
    def epsilon(self) -> float:
        """The constant that is added to the square root of the second moment."""
        return float(self._group.get("eps", 0.0))

    @property
    def decay(self) -> float | None:
        """Weight decay that is added to gradients, or None if it is decoupled from them."""
        decay = self._group.get("weight_decay")
        is_decoupled = self._group.get("decoupled_weight_decay", False)
        return None if is_decoupled or decay is None else float(decay)

    def shares(self, other: Any) -> bool:
        """Return whether the steps of another table have the same numbers."""
        return isinstance(other, TorchRule) and other._group is self._group

    def count(self) -> int | None:
        """Return the number of steps made, or None if the optimizer does not count them."""
        state = self._optimizer.state[self._weight]
        return int(state["step"]) if "step" in state else None

    def count_step(self) -> None:
        state = self._optimizer.state[self._weight]
        if "step" in state:
            state["step"] += 1

    def attach(self, reader: Reader) -> None:
        """Keep the optimizer from stepping the table: torch skips it if its gradient is None."""

    def detach(self) -> None:
        """Let the optimizer step the table again: it continues with the state."""

    @property
    def _names(self) -> tuple[str | None, str | None]:
        momentum = "momentum_buffer" if self._group.get("momentum") else None
        return {
            "adam": ("exp_avg", "exp_avg_sq"),
            "sgd": (momentum, None),
            "rmsprop": (momentum, "square_avg"),
            "adagrad": ("sum", None),
        }[self.name]

    def lower(self) -> LowerBits | None:
        """Return the lower halves of a bfloat16 table and its state; None for a float32 table."""
        if self._weight.dtype is torch.float32:
            return None
        state = self._optimizer.state[self._weight]

        def half(name: str) -> torch.Tensor:
            tensor: torch.Tensor | None = state.get(f"{name}{_LOWER}")
            if tensor is None:
                tensor = state[f"{name}{_LOWER}"] = torch.zeros_like(self._weight)
            return tensor

        first, second = (half(name) if name else None for name in self._names)
        return LowerBits(half("weight"), first, second)

    def state(self) -> State:
        """Return the two state tensors of a `table_rows.Table`, made as by the optimizer."""
        state, shape = self._optimizer.state[self._weight], self._weight.shape
        names, dtype = self._names, self._weight.dtype
        if self.name != "sgd":
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
        for name in filter(None, names):
            value = state.get(name)
            if value is None or not value.is_contiguous() or value.dtype is not dtype:
                # Written at once. Otherwise the first steps would wait for the system to provide
                # each page.
                is_large = dtype is torch.float32
                fresh = huge_pages.empty(shape) if is_large else torch.empty_like(self._weight)
                state[name] = fresh.zero_() if value is None else fresh.copy_(value)
        first, second = (state[name] if name else None for name in names)
        return first, second

    def step(self, count: int) -> Step:
        """Return the numbers of step `count`, which begins at 1."""
        group = self._group
        rate, decay = group["lr"], group["weight_decay"]
        if self.name == "adam":
            beta1, beta2 = group["betas"]
            is_decoupled = group.get("decoupled_weight_decay", False)
            return Step(
                rate / (1 - beta1**count),
                1 / math.sqrt(1 - beta2**count),
                1 - in_float32(1 - beta1),
                in_float32(beta2),
                in_float32(1 - rate * decay) if is_decoupled else 1.0,
                0.0 if is_decoupled else decay,
                first_rest=in_float32(1 - beta1),
                second_rest=in_float32(1 - beta2),
            )
        if self.name == "adagrad":
            return Step(rate / (1 + (count - 1) * group["lr_decay"]), decay=decay)
        momentum, alpha = in_float32(group["momentum"]), group.get("alpha", 0.0)
        is_nesterov, rest = group.get("nesterov", False), in_float32(1 - alpha)
        return Step(
            rate, 1.0, momentum, in_float32(alpha), 1.0, decay, is_nesterov, second_rest=rest
        )


RowRule: TypeAlias = TorchRule | KerasRule
