"""LAMB: Adam with decoupled weight decay, with its own learning rate for each layer."""

from __future__ import annotations

from typing import Any

import torch

from flatout.errors import ModelError
from flatout.optim.trust import GroupPart, Layerwise, Tensors, ratio


class Lamb(Layerwise):
    """Layer-wise adaptive moments, for very large batches (You et al. 2020, algorithm 2).

    For each tensor w with gradient g in its step t:

        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w
        w = w - lr * (|w| / |u|) * u

    The ratio |w| / |u| is 1 where one of them is 0. Tensors of one dimension (biases, parameters of
    normalization layers) take Adam's steps, without that ratio and without weight decay, as in the
    paper's own code.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: b1 and b2.
        eps: added to the square root.
        weight_decay: decoupled, as in AdamW.
        adapt_1d: treat tensors of one dimension as all others.

    Raises:
        ModelError: for a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adapt_1d: bool = False,
    ) -> None:
        decays = all(0 <= beta < 1 for beta in betas)
        if not (lr >= 0 and eps > 0 and weight_decay >= 0 and decays):
            raise ModelError(
                "LAMB takes lr >= 0, eps > 0, weight_decay >= 0 and betas from 0 to below 1, found "
                f"lr={lr} eps={eps} weight_decay={weight_decay} betas={betas}"
            )
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adapt_1d": adapt_1d,
        }
        super().__init__(params, options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch leaves the step count on the device of the checkpoint, the CPU.
        for parameter, own in self.state.items():
            if "step" in own:
                own["step"] = own["step"].to(parameter.device)

    def _step(self, part: GroupPart, group: dict[str, Any]) -> None:
        weights, rate = part.parameters, group["lr"]
        updates = self._updates(part, group)
        if part.adapted:
            if group["weight_decay"]:
                torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            factors = part.unless_bad(rate * ratio(part.norms(weights), part.norms(updates)), 0.0)
            torch._foreach_mul_(updates, list(factors.unbind()))
        else:
            torch._foreach_mul_(updates, part.unless_bad(rate, 0.0))
        torch._foreach_sub_(weights, updates)

    def _updates(self, part: GroupPart, group: dict[str, Any]) -> Tensors:
        gradients, (beta1, beta2) = part.gradients, group["betas"]
        states = [self._state(p) for p in part.parameters]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, part.unless_bad(1.0, 0.0))
        torch._foreach_mul_(means, part.unless_bad(beta1, 1.0))
        torch._foreach_add_(means, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, part.unless_bad(beta2, 1.0))
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        # In float64, because 1 - b2^t is small. The minimum is for a bad first step, which does not
        # count.
        count = torch.stack(counts).double().clamp_(min=1)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_mul_(updates, list((1 - beta2**count).rsqrt().unbind()))
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(means, updates)
        torch._foreach_mul_(updates, list((1 - beta1**count).reciprocal().unbind()))
        return list(updates)

    def _state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state
