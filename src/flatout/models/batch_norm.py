"""BatchNorm and the ReLU after it as a single operator, by Flatout's kernel where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flatout.kernels import batch_norm as kernel
from flatout.models.relu_pool import is_at_work
from flatout.models.trace import is_watched

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
}


# The name `forward` lets a pickled model find the forward of its class again.
def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Run the forward of a BatchNorm; the result is equal except for rounding."""
    result = _by_kernel(input, self, None, None)
    own: Callable[..., torch.Tensor] = type(self).forward
    return own(self, input) if result is None else result


def norm_and_activation(
    x: torch.Tensor,
    norm: Any,
    skip: torch.Tensor | None,
    activation: str,
    module: nn.Module | None,
) -> torch.Tensor:
    """Return `activation(norm(x) + skip)`, equal except for rounding."""
    if not is_watched(norm) and (module is None or not is_watched(module)):
        result = _by_kernel(x, norm, skip, activation)
        if result is not None:
            return result
    result = norm(x)
    if skip is not None:
        result = result + skip
    return _ACTIVATIONS[activation](result) if module is None else module(result)


def _by_kernel(
    x: torch.Tensor, norm: Any, skip: torch.Tensor | None, activation: str | None
) -> torch.Tensor | None:
    if not (norm.training and is_at_work(x)):
        return None
    if not kernel.fits(x, norm.weight, norm.bias, skip=skip):
        return None
    result: torch.Tensor
    result, moments = _BatchNorm.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, skip, activation, norm.eps
    )
    move_statistics(norm, moments[0], moments[1], x.numel() // x.shape[1])
    return result


@torch.no_grad()
def move_statistics(norm: Any, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
    """Update a BatchNorm's running statistics, as the layer itself does in training.

    Args:
        norm: the layer.
        mean: mean of the batch, of shape (channels,).
        variance: biased variance of the batch, of shape (channels,).
        count: number of values of each channel.
    """
    if norm.running_mean is None or norm.running_var is None or not norm.training:
        return
    norm.num_batches_tracked.add_(1)
    share = norm.momentum
    if share is None:  # the mean over all batches so far
        share = 1 / float(norm.num_batches_tracked)
    unbiased = variance * (count / max(1.0, count - 1))
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        skip: torch.Tensor | None,
        activation: str | None,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result, ctx.saved = kernel.forward(x, weight, bias, skip, activation, epsilon)
        is_seen = skip is not None and activation is not None
        ctx.save_for_backward(x, weight, bias, result if is_seen else None)
        ctx.has_skip = skip is not None
        ctx.mark_non_differentiable(ctx.saved.moments)
        return result, ctx.saved.moments

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _moments: Any) -> tuple[Any, ...]:
        x, weight, bias, saved_tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is needed
            return (*_differentiable(ctx, x, weight, bias, saved_tensors, gradient), None, None)
        wants_skip = ctx.has_skip and ctx.needs_input_grad[3]
        of_x, of_weight, of_bias, of_skip = kernel.backward(
            x, saved_tensors, gradient, ctx.saved, wants_skip
        )
        given = (None if weight is None else of_weight, None if bias is None else of_bias)
        return (of_x, *given, of_skip, None, None)


def _differentiable(
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    tensor: torch.Tensor | None,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    result = F.batch_norm(x, None, None, weight, bias, True, 0.0, ctx.saved.epsilon)
    if tensor is not None:
        gradient = gradient * (tensor > 0)
    elif ctx.saved.activation is not None:
        passes = (result > 0) & ((result < 6) if ctx.saved.activation == "relu6" else True)
        gradient = gradient * passes
    wanted = [item for item in (x, weight, bias) if item is not None and item.requires_grad]
    gradients = iter(torch.autograd.grad(result, wanted, gradient, create_graph=True))
    return (
        *(
            next(gradients) if p is not None and p.requires_grad else None
            for p in (x, weight, bias)
        ),
        gradient if ctx.has_skip else None,
    )
