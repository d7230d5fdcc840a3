"""Losses as (sum, weight): the division comes after everything is summed.

The weight is what the sum has to be divided by: samples for most losses, tokens that are not
ignored or summed class weights for others. Micro-batches and ranks then add up to exactly the loss
of the whole batch. Where the weight is known beforehand (it is the number of samples), the mean is
computed directly: that is the same number with one operation less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flatout.data.batch import Batch
from flatout.errors import ModelError

Value = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]
# Under autocast outputs may be in half precision; losses are computed in float32.
_HALF = (torch.bfloat16, torch.float16)
# A per-element loss: (output, target, reduction) -> tensor.
_Function = Callable[[Any, Any, str], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss for `Trainer`.

    Attributes:
        name: for messages and logs.
        function: `(output, target, reduction)` with reduction "mean", "sum" or "none".
        ignore_index: targets with this value carry no weight, or None.
        class_weight: weight of each class, shape (classes,), or None.
        own: a user's callable `(output, target)` giving a mean, or (sum, weight); replaces the
        rest.
    """

    name: str
    function: _Function | None = None
    ignore_index: int | None = None
    class_weight: torch.Tensor | None = None
    own: Callable[[Any, Any], Value] | None = None

    def __call__(self, output: Any, batch: Batch, *, unweighted: bool = False) -> Value:
        """The batch's loss: a mean over its samples, or (sum, weight).

        Args:
            output: what the model returned.
            batch: its targets and, if given, per-sample weights, shape (samples,).
            unweighted: no target of this source can be ignored (known from its labels).
        """
        if self.own is not None:
            return self._own_value(output, batch)
        assert self.function is not None
        if torch.is_tensor(output) and output.dtype in _HALF:
            output = output.float()
        if batch.weight is not None:
            return self._sample_weighted(output, batch)
        if self.class_weight is None and (self.ignore_index is None or unweighted):
            return self.function(output, batch.targets, "mean")
        assert isinstance(batch.targets, torch.Tensor)
        return self.function(output, batch.targets, "sum"), self._weight(batch.targets)

    def _own_value(self, output: Any, batch: Batch) -> Value:
        assert self.own is not None
        value = self.own(output, batch.targets)
        if batch.weight is not None:
            raise ModelError(
                f"sample weights were given, but the loss {self.name} does not take them",
                do="use a standard loss name, or weigh inside the loss and return (sum, weight)",
            )
        if isinstance(value, tuple):
            return value
        if not torch.is_tensor(value) or value.numel() != 1:
            found = tuple(value.shape) if torch.is_tensor(value) else type(value).__name__
            raise ModelError(
                f"the loss {self.name} must return one number or (sum, weight), found {found}",
                do="reduce it with .mean(), or return (values.sum(), how_many)",
            )
        return value

    def _sample_weighted(self, output: Any, batch: Batch) -> Value:
        """Sum of weight times loss over the sum of weights; other dimensions are averaged."""
        assert self.function is not None
        assert batch.weight is not None
        each = self.function(output, batch.targets, "none")
        if self.class_weight is not None or each.dim() != 1:
            each = each.reshape(len(batch.weight), -1).mean(1)
        return (each * batch.weight).sum(), batch.weight.sum()

    def _weight(self, target: torch.Tensor) -> torch.Tensor:
        if target.is_floating_point():
            return torch.tensor(float(target.shape[0]), device=target.device)
        counted = torch.ne(target, -100 if self.ignore_index is None else self.ignore_index)
        if self.class_weight is None:
            return counted.sum()
        weights = self.class_weight.to(target.device)
        return weights[target.clamp_min(0)].mul(counted).sum()


def _cross_entropy(output: Any, target: Any, reduction: str) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction=reduction)


def _nll(output: Any, target: Any, reduction: str) -> torch.Tensor:
    return F.nll_loss(output, target, reduction=reduction)


def _like(function: Callable[..., torch.Tensor]) -> _Function:
    """Losses whose output and target have one shape; an (n, 1) output fits an (n,) target."""

    def loss(output: Any, target: Any, reduction: str) -> torch.Tensor:
        if output.shape != target.shape and output.numel() == target.numel():
            output = output.reshape(target.shape)
        if output.shape != target.shape:
            raise ModelError(
                f"output {tuple(output.shape)} and target {tuple(target.shape)} differ in shape",
                do="let the model return one value per target value",
            )
        return function(output, target.to(output.dtype), reduction=reduction)

    return loss


_STANDARD: dict[str, Loss] = {
    "cross_entropy": Loss("cross_entropy", _cross_entropy, ignore_index=-100),
    "nll": Loss("nll", _nll, ignore_index=-100),
    "binary_cross_entropy": Loss("binary_cross_entropy", _like(F.binary_cross_entropy_with_logits)),
    "mse": Loss("mse", _like(F.mse_loss)),
    "mae": Loss("mae", _like(F.l1_loss)),
    "huber": Loss("huber", _like(F.huber_loss)),
}


def as_loss(loss: Any) -> Loss:
    """A Loss from a standard name, a torch loss module, or a callable.

    A callable gets `(output, target)` and returns a mean over the samples or (sum, weight).
    `binary_cross_entropy` takes logits.

    Raises:
        ModelError: for an unknown name or a thing that cannot be called.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        if loss not in _STANDARD:
            raise ModelError(
                f"unknown loss {loss!r}; known: {', '.join(_STANDARD)}",
                do="use one of these names, or pass a callable (output, target) -> loss",
            )
        return _STANDARD[loss]
    if type(loss) is nn.CrossEntropyLoss and loss.reduction == "mean":
        return _from_cross_entropy(loss)
    if callable(loss):
        return Loss(getattr(loss, "__name__", type(loss).__name__), own=loss)
    raise ModelError(f"a loss is a name or a callable, found {type(loss).__name__}")


def _from_cross_entropy(module: nn.CrossEntropyLoss) -> Loss:
    def function(output: Any, target: Any, reduction: str) -> torch.Tensor:
        return F.cross_entropy(
            output,
            target,
            weight=module.weight,
            ignore_index=module.ignore_index,
            label_smoothing=module.label_smoothing,
            reduction=reduction,
        )

    return Loss("CrossEntropyLoss", function, module.ignore_index, module.weight)
