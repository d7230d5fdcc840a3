"""Keras' BatchNormalization over the whole batch, on any number of ranks.

The layer computes the moments of a batch in a single method. All else (moving statistics, `renorm`,
`axis`, `epsilon`, `momentum`) follows from the moments and stays Keras' own code. So that method is
replaced by one that combines the moments of all ranks, as in sync_batch_norm.py. In backward, the
gradients of the moments are summed over all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from flatout.world import World

Moments = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def _is_norm(layer: nn.Module) -> bool:
    kind = _kind()
    return kind is not None and isinstance(layer, kind)


def has_own_moments(layer: nn.Module) -> bool:
    """Return whether a custom BatchNormalization's moments cannot be replaced."""
    kind: Any = _kind()
    cls: Any = type(layer)
    return _is_norm(layer) and (cls.call, cls._moments) != (kind.call, kind._moments)


def _kind() -> type | None:
    # Keras is not imported here, because it chooses its backend when the user imports it.
    keras = sys.modules.get("keras")
    layers = getattr(keras, "layers", None)
    return getattr(layers, "BatchNormalization", None)


def share_moments(
    modules: Iterable[nn.Module], part: Callable[[], tuple[World, bool]]
) -> list[nn.Module]:
    """Let BatchNormalizations compute their moments over a World, until `own_moments`.

    Args:
        modules: modules that are searched for BatchNormalization layers.
        part: function that returns the ranks among which a batch is split, and whether this rank's
            part has only padding rows, which do not count.

    Returns:
        the layers whose moments are shared.
    """
    layers = [layer for layer in modules if _is_norm(layer)]
    for layer in layers:
        # This bypasses Keras' own __setattr__, which would track the function as a part of the
        # layer.
        vars(layer)["_moments"] = _moments_over(part, layer)
    return layers


def own_moments(layers: Iterable[nn.Module]) -> None:
    """Undo `share_moments` on these layers."""
    for layer in layers:
        del vars(layer)["_moments"]


def _moments_over(part: Callable[[], tuple[World, bool]], layer: Any) -> Moments:
    def moments(
        inputs: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        world, is_filling = part()
        if world.size == 1:
            return type(layer)._moments(layer, inputs, mask)  # type: ignore[no-any-return]
        return _Moments.apply(inputs, mask, layer.axis, world, is_filling)  # type: ignore[no-any-return, no-untyped-call]

    return moments


class _Moments(torch.autograd.Function):
    """Mean and biased variance of each channel over all ranks, of shape (channels,)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        axis: int,
        world: World,
        is_filling: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        axis %= x.dim()
        dims = [dim for dim in range(x.dim()) if dim != axis]
        counted = None if mask is None else mask.bool().unsqueeze(-1).expand_as(x)
        mean, squares, count = _of_part(x, counted, dims, axis)
        mean, squares, count = _over_all(world, mean, squares, -count if is_filling else count)
        if mask is not None:
            # Keras divides by the count plus Keras' epsilon, so that a count of 0 gives no NaN.
            divisor = count + _epsilon()
            shrunk = mean * count / divisor
            squares = squares + count * (mean - shrunk) ** 2
            mean = shrunk
        else:
            divisor = count
        mean, variance = mean.to(x.dtype), (squares / divisor).to(x.dtype)
        ctx.save_for_backward(x, counted, mean, divisor.to(x.dtype))
        ctx.axis, ctx.world, ctx.is_filling = axis, world, is_filling
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, counted, mean, divisor = ctx.saved_tensors
        both = torch.cat(gradients)
        ctx.world.sum(both, "BatchNormalization's gradients")
        of_mean, of_variance = both.view(2, -1) / divisor
        inner = (x - _spread(mean, x, ctx.axis)) * _spread(2 * of_variance, x, ctx.axis)
        inner += _spread(of_mean, x, ctx.axis)
        if ctx.is_filling:  # the statistics do not depend on this rank's input
            inner = torch.zeros_like(inner)
        inner = inner if counted is None else inner.where(counted, 0)
        return inner, None, None, None, None


def _of_part(
    x: torch.Tensor, counted: torch.Tensor | None, dims: list[int], axis: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if counted is None:
        variance, mean = torch.var_mean(x, dims, correction=0)
        count = torch.full_like(mean, x.numel() / x.size(axis))
        return mean, variance * count, count
    count = counted.sum(dims).to(x.dtype)
    mean = x.where(counted, 0).sum(dims) / count.clamp_min(1)
    away = (x - _spread(mean, x, axis)).where(counted, 0)
    return mean, away.square().sum(dims), count


def _over_all(
    world: World, mean: torch.Tensor, squares: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = torch.zeros(world.size, 3, len(mean), dtype=torch.float64, device=mean.device)
    table[world.rank] = torch.stack([mean, squares, count])
    world.sum(table, "BatchNormalization's statistics")
    means, deviations, counts = table.unbind(1)
    is_any = (counts > 0).any()
    share = torch.where(is_any, (counts > 0).double(), 1 / len(counts))
    deviations, counts = deviations * share, counts.abs() * share
    total = counts.sum(0)
    whole = (means * counts).sum(0) / total.clamp_min(1)
    return whole, (deviations + counts * (means - whole) ** 2).sum(0), total


def _spread(values: torch.Tensor, like: torch.Tensor, axis: int) -> torch.Tensor:
    shape = [1] * like.dim()
    shape[axis] = -1
    return values.view(shape)


def _epsilon() -> float:
    from keras import config

    return float(config.epsilon())
