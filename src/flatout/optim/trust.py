"""What LARS and LAMB share: the trust ratio, and updates that bad gradients do not reach.

Both follow torch's convention for optimizers that work with loss scaling on the device: the one who
calls `step` may set `found_inf` (not 0 where a gradient is not finite) and `grad_scale` on the
optimizer. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]


class GroupPart(NamedTuple):
    """Parameters of a group that are computed together: of one device and dtype, with gradients.

    Attributes:
        parameters: of any shapes.
        gradients: of theirs; not those of the optimizer where they had to be changed.
        adapted: whether trust ratio and weight decay are for them.
        bad: a bool scalar on their device, true where a gradient is not finite; None where the
            caller has made sure of that. Gradients are then zero.
    """

    parameters: Tensors
    gradients: Tensors
    adapted: bool
    bad: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """What norms and factors are computed in: float32, also for half precision, or float64."""
        return torch.float64 if self.parameters[0].dtype is torch.float64 else torch.float32

    def norms(self, tensors: Tensors) -> torch.Tensor:
        """2-norms of tensors of these parameters, as a vector."""
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=self.dtype))

    def unless_bad(self, value: Any, otherwise: float) -> Any:
        """`value`, or `otherwise` for bad gradients, without asking the device which."""
        if self.bad is None:
            return value
        if not torch.is_tensor(value):
            value = torch.full((), value, dtype=self.dtype, device=self.bad.device)
        return torch.where(self.bad, otherwise, value)


class Layerwise(torch.optim.Optimizer):
    """An optimizer that steps part by part."""

    # The one who scales losses leaves the look at `found_inf` to this class.
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients; returns what `closure` gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for part in parts_of(self, group):
                self._step(part, group)
        return loss

    def _step(self, part: GroupPart, group: dict[str, Any]) -> None:
        raise NotImplementedError


def parts_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[GroupPart]:
    """The parts of a parameter group, unscaled, and with zeros where gradients are bad."""
    kinds: dict[tuple[torch.device, torch.dtype, bool], Tensors] = {}
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        if parameter.grad.layout is not torch.strided:
            raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
        adapted = group["adapt_1d"] or parameter.dim() > 1
        kinds.setdefault((parameter.device, parameter.dtype, adapted), []).append(parameter)
    found_inf = getattr(optimizer, "found_inf", None)
    scale = getattr(optimizer, "grad_scale", None)
    for (device, _, adapted), parameters in kinds.items():
        gradients = [p.grad for p in parameters if p.grad is not None]
        if scale is not None:
            torch._foreach_mul_(gradients, scale.to(device).reciprocal().to(torch.float32))
        bad = None
        if found_inf is not None:
            bad = found_inf.to(device) != 0
            # NaN times zero would still be NaN.
            gradients = [gradient.masked_fill(bad, 0) for gradient in gradients]
        yield GroupPart(parameters, gradients, adapted, bad)


def ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """above / below, and 1 where one of them is zero: such a layer takes a plain step."""
    return torch.where((above > 0) & (below > 0), above / below, 1.0)
