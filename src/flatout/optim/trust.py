"""Common parts of LARS and LAMB: the trust ratio, and updates that ignore bad gradients.

Both follow torch's convention for optimizers that support loss scaling on the device. The caller of
`step` may set `found_inf` (not 0 if a gradient is not finite) and `grad_scale` on the optimizer.
The host never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]


class GroupPart(NamedTuple):
    """Parameters of a group that are computed together: of one device and dtype, with gradients.

    Attributes:
        parameters: tensors of any shapes.
        gradients: their gradients; changed copies if the optimizer's gradients had to be changed.
        adapted: whether the trust ratio and the weight decay apply to them.
        bad: a bool scalar on their device, true if a gradient is not finite; None if the caller has
            excluded that. If it is true, the gradients are zero.
    """

    parameters: Tensors
    gradients: Tensors
    adapted: bool
    bad: torch.Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.parameters[0].dtype is torch.float64 else torch.float32

    def norms(self, tensors: Tensors) -> torch.Tensor:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=self.dtype))

    def unless_bad(self, value: Any, otherwise: float) -> Any:
        """Return `value`, or `otherwise` for bad gradients, without waiting for the device."""
        if self.bad is None:
            return value
        if not torch.is_tensor(value):
            value = torch.full((), value, dtype=self.dtype, device=self.bad.device)
        return torch.where(self.bad, otherwise, value)


class Layerwise(torch.optim.Optimizer):
    """Base of optimizers that step parameters in parts (see `GroupPart`)."""

    # GradScaler then leaves the check of `found_inf` to this class.
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
    """Yield the parts of a parameter group, with unscaled gradients; bad gradients are zero."""
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
    """Return above / below, or 1 if one of them is zero, so that the layer takes a plain step."""
    return torch.where((above > 0) & (below > 0), above / below, 1.0)
