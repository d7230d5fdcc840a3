"""BatchNorm over the whole batch, on any number of ranks, also on CPUs.

The ranks exchange mean, squared deviations and count of their parts of the batch in one collective.
They are combined by the formulas of Chan, Golub and LeVeque ("Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979). Backward needs one more collective, for the two
sums over the batch in the gradient (Ioffe and Szegedy, "Batch Normalization", 2015). The code for
Keras' layers is in models/keras/batch_norm.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatout.models import modules_of, move_statistics, own_moments, share_moments
from flatout.world import ONE, World


class SyncBatchNorm:
    """Makes a model's BatchNorm layers compute their statistics over all ranks, until `close`.

    They do so only within `together`. Elsewhere, as when one rank tries something, they use the
    rank's own samples, without a collective. A single sample is then allowed.

    Modules, parameters and the keys of the state dict stay the same.

    Attributes:
        ranks: the ranks that train together.
        world: the ranks whose parts make the present batch.
        copies: number of ranks that compute the whole present batch; 1 if each has its own part.
        is_filling: whether this rank's part has only padding rows, so that none counts.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.ranks = world
        self.world = ONE
        self.copies = 1
        self.is_filling = False
        modules = modules_of(model)
        self.layers = [
            layer
            for layer in modules
            if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        ]
        for layer in self.layers:
            layer.forward = _forward(self, layer)  # type: ignore[method-assign]
        self.of_keras = share_moments(modules, lambda: (self.world, self.is_filling))

    @property
    def has_layers(self) -> bool:
        """True if the model has such layers."""
        return bool(self.layers or self.of_keras)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all ranks run the same forward and backward, each on its part, in the block."""
        self.world = self.ranks
        try:
            yield
        finally:
            self.world, self.copies, self.is_filling = ONE, 1, False

    def close(self) -> None:
        """Restore the layers' own code."""
        for layer in self.layers:
            del layer.forward
        own_moments(self.of_keras)


def _forward(sync: SyncBatchNorm, layer: _BatchNorm) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        # With running statistics nothing is computed over ranks.
        if not layer.training and layer.running_mean is not None:
            return type(layer).forward(layer, x)
        layer._check_input_dim(x)  # type: ignore[no-untyped-call]
        return _Normalized.apply(x, layer.weight, layer.bias, layer, sync)  # type: ignore[no-any-return, no-untyped-call]

    return forward


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        layer: _BatchNorm,
        sync: SyncBatchNorm,
    ) -> torch.Tensor:
        values = x.double() if x.dtype == torch.float64 else x.float()
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = x.numel() / x.size(1)
        variance, mean = torch.var_mean(values, dims, correction=0)
        own = -count if sync.is_filling else count
        mean, variance, total = _over_all(sync.world, mean, variance, own)
        if sync.world.size > 1 and total <= sync.copies:
            # The message of torch for a whole batch on one rank.
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.size()}"
            )
        move_statistics(layer, mean, variance, total / sync.copies)
        scale = torch.rsqrt(variance + layer.eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.world, ctx.dims, ctx.total = sync.world, dims, total
        ctx.is_filling = sync.is_filling and sync.world.size > 1
        ctx.has_bias = bias is not None
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        return (values * _spread(factor, x) + _spread(shift, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - _spread(mean, x)) * _spread(scale, x)
        of_bias = gradient.sum(ctx.dims)
        of_weight = (gradient * normal).sum(ctx.dims)
        both = torch.cat([of_bias, of_weight])
        ctx.world.sum(both, "BatchNorm's gradients")
        sums = both.view(2, -1) / ctx.total
        factor = scale if weight is None else scale * weight
        inner = gradient - _spread(sums[0], x) - normal * _spread(sums[1], x)
        if ctx.is_filling:  # the statistics do not depend on padding
            inner = torch.zeros_like(inner)
        # Gradients of the parameters are this rank's part, and are summed with all others.
        return (
            (inner * _spread(factor, x)).to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(mean.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _over_all(
    world: World, mean: torch.Tensor, variance: torch.Tensor, count: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    channels = len(mean)
    table = torch.zeros(world.size, 2 * channels + 1, dtype=torch.float64, device=mean.device)
    table[world.rank, :channels] = mean
    table[world.rank, channels:-1] = variance
    table[world.rank, -1] = count
    world.sum(table, "BatchNorm's statistics")
    means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    counts = torch.where((counts > 0).any(), counts.clamp_min(0), -counts / len(counts))
    total = counts.sum()
    whole = (means * counts).sum(0) / total
    spread = ((variances + (means - whole) ** 2) * counts).sum(0) / total
    return whole.to(mean.dtype), spread.to(mean.dtype), float(total)


@torch.no_grad()
def _spread(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
