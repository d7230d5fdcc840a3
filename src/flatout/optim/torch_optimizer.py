"""The adapter for torch's optimizers. models/keras has the one for Keras' optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from flatout.models import not_stepped
from flatout.optim.late_group import add_late_group
from flatout.optim.row_rules import TorchRule, why_all_rows

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class TorchOptimizer:
    """Common interface to the optimizers of torch and Keras.

    Attributes:
        given: the user's own object.
        averages_state: whether its state can be averaged over ranks that step independently.
        clips_itself: whether its step clips gradients by its own options.
        is_scheduled: whether it changes the learning rate without a scheduler.
        batches_per_update: number of batches whose gradients it accumulates for one update.
        rate_names: names of the learning rate in `options`.
    """

    averages_state = True
    clips_itself = False
    is_scheduled = False
    batches_per_update = 1
    rate_names = ("lr",)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.given: Any = optimizer

    @property
    def can_be_fused(self) -> bool:
        kind = type(self.given)
        return kind in _FUSED and all(
            group.get("fused") is None
            and group.get("foreach") is None
            and not group.get("differentiable")
            and not group.get("capturable")
            and all(_has_kernel(kind, parameter) for parameter in group["params"])
            for group in self.given.param_groups
        )

    def scaler(self, device: str) -> torch.amp.GradScaler | None:
        return None

    def second(self, parameters: Sequence[Sequence[torch.Tensor]]) -> torch.optim.Optimizer:
        """Return an optimizer of the same class and options, without hooks and state."""
        groups = [
            {**group, "params": own}
            for group, own in zip(self.given.param_groups, parameters, strict=True)
            if own
        ]
        kind: type[torch.optim.Optimizer] = type(self.given)
        other = kind.__new__(kind)
        state = {"defaults": dict(self.given.defaults), "state": defaultdict(dict)}
        other.__setstate__({**state, "param_groups": groups})
        return other

    # -- rates and options -------------------------------------------------------------------

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        groups = self.given.param_groups
        given = [group["lr"] for group in groups]
        for group, rate in zip(groups, given, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, given, strict=True):
                group["lr"] = rate

    def options(self) -> list[dict[str, Any]]:
        return list(self.given.param_groups)

    def take_option(self, group: int, name: str, value: Any) -> None:
        self.given.param_groups[group][name] = value

    # -- parameters --------------------------------------------------------------------------

    def parameters_left_out(self, model: nn.Module) -> Sequence[str]:
        grouped = {id(p) for group in self.given.param_groups for p in group["params"]}
        return not_stepped(model, grouped)

    def hold(
        self, values: Sequence[torch.Tensor], model: Any, lr: float | None, scheduler: Any = None
    ) -> None:
        """Take over parameters that do not train yet, in a parameter group of their own."""
        groups = self.given.param_groups
        grouped = {id(p) for group in groups for p in group["params"]}
        if lr is None:
            own = [p for p in values if id(p) not in grouped]
        else:
            own = list(values)
            moved = {id(p) for p in own}
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) not in moved]
        if own:
            add_late_group(self.given, scheduler, own, lr)

    def begin(self) -> None:
        """Do nothing: torch's optimizers step newly trained parameters without preparation."""

    # -- rows of tables ----------------------------------------------------------------------

    def why_all_rows(self, group: Mapping[str, Any]) -> str:
        return why_all_rows(self.given, group)

    def row_rule(self, group: dict[str, Any], weight: nn.Parameter) -> TorchRule:
        return TorchRule(self.given, group, weight)

    def clip_rows(self, weights: Sequence[torch.Tensor]) -> None:
        """Do nothing: no torch optimizer clips gradients by itself."""

    @torch.no_grad()
    def change_state(
        self,
        parameter: torch.Tensor,
        shape: torch.Size,
        change: Callable[[str, torch.Tensor], torch.Tensor],
    ) -> None:
        state = self.given.state.get(parameter, {})
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() == 2 and len(value) == shape[0]:
                state[key] = change(key, value)

    def first_state(self, parameter: torch.Tensor, name: str) -> float:
        for group in self.given.param_groups:
            if name == "sum" and any(parameter is item for item in group["params"]):
                return float(group.get("initial_accumulator_value", 0.0))
        return 0.0


def _has_kernel(kind: type[torch.optim.Optimizer], parameter: torch.Tensor) -> bool:
    if not parameter.is_floating_point() or parameter.layout != torch.strided:
        return False
    is_half = parameter.is_cpu and parameter.element_size() == 2
    return not (is_half and kind is torch.optim.SGD) or _steps_half(parameter.dtype)


@cache
def _steps_half(dtype: torch.dtype) -> bool:
    """Return True if torch's fused SGD steps all of a bf16 or fp16 tensor on the CPU.

    The kernel of torch 2.13 leaves whole vectors unchanged. The kernel of torch 2.14 is right.
    """
    weight = torch.ones(32, dtype=dtype, device="cpu")
    torch._fused_sgd_(
        [weight],
        [torch.ones_like(weight)],
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=0.5,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
    )
    return bool((weight == 0.5).all())
