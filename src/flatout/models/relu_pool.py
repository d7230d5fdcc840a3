"""2x2 max-pooling and ReLU as a single operator, by Flatout's kernel where possible."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flatout.kernels import relu_pool as kernel
from flatout.models.trace import is_watched

KERNEL_SIZE = 2


def relu_pool(
    images: torch.Tensor, pool: nn.Module | None, relu: nn.Module | None, is_written: bool
) -> torch.Tensor:
    """Return `F.relu(F.max_pool2d(images, 2))`, bit for bit except for the sign of a zero."""
    if (
        is_at_work(images)
        and kernel.fits(images)
        and not any(p is not None and is_watched(p) for p in (pool, relu))
    ):
        result: torch.Tensor = _ReluPool.apply(images)  # type: ignore[no-untyped-call]
        return result
    pooled = F.max_pool2d(images, KERNEL_SIZE) if pool is None else pool(images)
    if is_written:
        return F.threshold(pooled, 0.0, 0.0)
    return F.relu(pooled) if relu is None else relu(pooled)


def is_at_work(x: torch.Tensor) -> bool:
    """Return whether autograd is active and no compiler or tracer reads single operators."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state()
        or torch._C._are_functorch_transforms_active()
    ) and (torch.is_grad_enabled() and x.requires_grad)


class _ReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: torch.Tensor) -> torch.Tensor:
        result, codes = kernel.forward(images)
        ctx.save_for_backward(codes)
        ctx.size = images.shape[2:]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (codes,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is needed
            return _spread(gradient, codes, ctx.size)
        return kernel.backward(gradient, codes, *ctx.size)


def _spread(gradient: torch.Tensor, codes: torch.Tensor, size: torch.Size) -> torch.Tensor:
    codes = codes.permute(0, 3, 1, 2)
    rows = torch.stack(
        [torch.stack([gradient * (codes == 2 * i + j) for j in (0, 1)], -1) for i in (0, 1)], -3
    )
    spread = rows.flatten(-2).flatten(-3, -2)
    beside, below = size[1] - spread.shape[-1], size[0] - spread.shape[-2]
    return F.pad(spread, (0, beside, 0, below))
