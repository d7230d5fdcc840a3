"""LARS: SGD with momentum, with its own learning rate for each layer."""

from __future__ import annotations

from typing import Any

import torch

from flatout.errors import ModelError
from flatout.optim.trust import GroupPart, Layerwise, Tensors, ratio


class Lars(Layerwise):
    """Layer-wise adaptive rate scaling, for very large batches (You, Gitman, Ginsburg 2017).

    For each tensor w with gradient g, weight decay b and momentum m:

        local = trust * |w| / (|g| + b * |w|)
        v     = m * v + lr * local * (g + b * w)
        w     = w - v

    `local` is 1 where |w| or |g| is 0. Tensors of one dimension (biases, parameters of
    normalization layers) take plain steps, with neither `local` nor weight decay, as is usual since
    the paper. Because `trust` is small, `lr` is large: of the order of 10.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: m, from 0 to below 1.
        weight_decay: b.
        trust: the move of a tensor with lr=1, as a fraction of its norm (0.001 in the paper).
        adapt_1d: treat tensors of one dimension as all others.

    Raises:
        ModelError: for a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust: float = 0.001,
        adapt_1d: bool = False,
    ) -> None:
        if not (lr >= 0 and weight_decay >= 0 and trust > 0 and 0 <= momentum < 1):
            raise ModelError(
                "LARS takes lr >= 0, weight_decay >= 0, trust > 0 and 0 <= momentum < 1, found "
                f"lr={lr} weight_decay={weight_decay} trust={trust} momentum={momentum}"
            )
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "adapt_1d": adapt_1d,
        }
        super().__init__(params, options)

    def _step(self, part: GroupPart, group: dict[str, Any]) -> None:
        weights, momentum = part.parameters, group["momentum"]
        moves = _moves(part, group)
        if momentum:
            buffers = [self._buffer(p) for p in weights]
            torch._foreach_mul_(buffers, part.unless_bad(momentum, 1.0))
            torch._foreach_add_(buffers, moves)
            moves = buffers
            if part.bad is not None:
                moves = list(torch._foreach_mul(buffers, part.unless_bad(1.0, 0.0)))
        torch._foreach_sub_(weights, moves)

    def _buffer(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer


def _moves(part: GroupPart, group: dict[str, Any]) -> Tensors:
    weights, gradients, rate = part.parameters, part.gradients, group["lr"]
    if not part.adapted:
        return list(torch._foreach_mul(gradients, rate))
    decay = group["weight_decay"]
    above, below = part.norms(weights), part.norms(gradients)
    local = ratio(group["trust"] * above, torch.where(below > 0, below + decay * above, 0.0))
    if decay:
        gradients = list(torch._foreach_add(gradients, weights, alpha=decay))
    factors = part.unless_bad(rate * local, 0.0)
    return list(torch._foreach_mul(gradients, list(factors.unbind())))
