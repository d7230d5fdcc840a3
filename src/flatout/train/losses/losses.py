"""Losses as (sum, weight): the division comes after all sums are added up.

The weight is the divisor of the sum. It is the number of samples for most losses. For other losses
it is the number of tokens that are not ignored, or the sum of class weights. Micro-batches and
ranks then add up to exactly the loss of the whole batch. If the weight is the number of samples,
the mean is computed directly, which saves an operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flatout.data import Batch, rows_of_samples
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
        name: name of the loss, for messages and logs.
        function: callable `(output, target, reduction)` with reduction "mean", "sum" or "none".
        ignore_index: class labels with this value carry no weight; None where targets are no
            class labels.
        module: the torch loss whose `weight`, shape (classes,), weighs the classes, or None.
        own: a user's callable `(output, target)` that returns a mean, or (sum, weight); it replaces
            the other attributes.
    """

    name: str
    function: _Function | None = None
    ignore_index: int | None = None
    module: nn.Module | None = None
    own: Callable[[Any, Any], Value] | None = None

    @property
    def own_parts(self) -> list[Any]:
        """The user's own objects that are called."""
        return [self.module, self.own]

    def __call__(self, output: Any, batch: Batch, *, unweighted: bool = False) -> Value:
        """Return the batch's loss: a mean over its samples, or (sum, weight)."""
        if self.own is not None:
            return self._own_value(self.own, output, batch)
        assert self.function is not None
        target = batch.targets
        if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor):
            raise _no_tensor(self.name, output, target)
        if output.dtype in _HALF:
            output = output.float()
        are_labels = self.ignore_index is not None and not target.is_floating_point()
        if are_labels and target.dtype is not torch.int64:
            target = target.long()
        if batch.weight is not None:
            return self._sample_weighted(output, target, batch.weight, are_labels)
        if not are_labels or (unweighted and self._class_weight is None):
            return self.function(output, target, "mean")
        return self.function(output, target, "sum"), self._weight_of_each(target).sum()

    def weight_of(self, batch: Batch) -> torch.Tensor | float:
        """Return the divisor of this loss's sum over the batch, which needs no output.

        For a callable it is the number of samples, as for a callable that returns a mean.
        """
        target, weight = batch.targets, batch.weight
        if self.own is not None or not isinstance(target, torch.Tensor):
            return float(batch.samples)
        if self.ignore_index is not None and not target.is_floating_point():
            each = self._weight_of_each(target.long())
            if weight is not None:
                each = each * weight.reshape(-1, *[1] * (each.dim() - 1))
            return each.sum()
        if weight is None:
            return float(batch.size)
        of_classes = self.ignore_index is not None and target.dim() > 1
        values = target.numel() // len(target) // (target.shape[1] if of_classes else 1)
        return weight.sum() * values

    @property
    def _class_weight(self) -> torch.Tensor | None:
        weight = None if self.module is None else self.module.weight
        assert weight is None or isinstance(weight, torch.Tensor)
        return weight

    def _own_value(self, own: Callable[[Any, Any], Value], output: Any, batch: Batch) -> Value:
        if batch.padding:
            return self._own_value_of_samples(own, output, batch)
        if batch.weight is not None:
            raise ModelError(
                f"weights of samples or classes were given, but the loss {self.name} does not take "
                "them",
                do="use a standard loss name, or weigh inside the loss and return (sum, weight)",
            )
        value = own(output, batch.targets)
        total = value[0] if isinstance(value, tuple) and len(value) == 2 else value
        if not torch.is_tensor(total) or total.numel() != 1:
            result = tuple(total.shape) if torch.is_tensor(total) else type(total).__name__
            raise ModelError(
                f"the loss {self.name} must return one number or (sum, weight), found {result}",
                do="reduce it with .mean(), or return (values.sum(), how_many)",
            )
        return value

    def _own_value_of_samples(
        self, own: Callable[[Any, Any], Value], output: Any, batch: Batch
    ) -> Value:
        if not batch.samples:  # this rank's part is padding only, with weight 0
            value = self._own_value(own, output, batch._replace(padding=0, weight=None))
            return (value[0] if isinstance(value, tuple) else value) * 0.0, 0.0
        real = batch.without_padding()
        value = self._own_value(own, rows_of_samples(output, batch), real)
        return value if isinstance(value, tuple) else (value * real.size, real.size)

    def _sample_weighted(
        self, output: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, are_labels: bool
    ) -> Value:
        assert self.function is not None
        each = self.function(output, target, "none")
        weight = weight.to(each.dtype).reshape(-1, *[1] * (each.dim() - 1))
        total = (each * weight).sum()
        if are_labels:
            return total, (self._weight_of_each(target) * weight).sum()
        return total, weight.sum() * (each.numel() // len(weight))

    def _weight_of_each(self, labels: torch.Tensor) -> torch.Tensor:
        assert self.ignore_index is not None
        counted = torch.ne(labels, self.ignore_index)
        classes = self._class_weight
        if classes is None:
            return counted
        return classes[labels.where(counted, 0)] * counted


def _no_tensor(name: str, output: Any, target: Any) -> ModelError:
    return ModelError(
        f"the loss {name} compares one tensor with one tensor, found output "
        f"{type(output).__name__} and target {type(target).__name__}",
        do="give targets with the data, or pass a callable (output, target) -> loss",
    )


def _cross_entropy(output: Any, target: Any, reduction: str) -> torch.Tensor:
    return F.cross_entropy(output, target, reduction=reduction)


def _nll(output: Any, target: Any, reduction: str) -> torch.Tensor:
    return F.nll_loss(output, target, reduction=reduction)


def _like(function: Callable[..., torch.Tensor]) -> _Function:
    def loss(output: Any, target: Any, reduction: str) -> torch.Tensor:
        output = in_shape_of(output, target)
        return function(output, target.to(output.dtype), reduction=reduction)

    return loss


def in_shape_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `output` in the shape of `target`; they may differ in dimensions of length one."""
    if output.shape == target.shape:
        return output
    ours, theirs = ([d for d in t.shape[1:] if d != 1] for t in (output, target))
    if output.shape[:1] != target.shape[:1] or ours != theirs:
        raise ModelError(
            f"output {tuple(output.shape)} and target {tuple(target.shape)} differ in shape",
            do="let the model return one value per target value",
        )
    return output.reshape(target.shape)


_STANDARD: dict[str, Loss] = {
    "cross_entropy": Loss("cross_entropy", _cross_entropy, ignore_index=-100),
    "nll": Loss("nll", _nll, ignore_index=-100),
    "binary_cross_entropy": Loss("binary_cross_entropy", _like(F.binary_cross_entropy_with_logits)),
    "mse": Loss("mse", _like(F.mse_loss)),
    "mae": Loss("mae", _like(F.l1_loss)),
    "huber": Loss("huber", _like(F.huber_loss)),
}
# torch's own functions; as plain callables they would weigh micro-batches by number of samples.
_FUNCTIONS = ((F.cross_entropy, "cross_entropy"), (F.nll_loss, "nll"))


def as_loss(loss: Any) -> Loss:
    """Return a Loss for a standard name, a torch loss module, or a callable.

    A callable gets `(output, target)` and returns a mean over the samples or (sum, weight).
    `binary_cross_entropy` takes logits.
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
    if isinstance(loss, nn.Module):
        return _from_module(loss)
    if callable(loss):
        for function, name in _FUNCTIONS:
            if loss is function:
                return _STANDARD[name]
        return Loss(getattr(loss, "__name__", type(loss).__name__), own=loss)
    raise ModelError(f"a loss is a name or a callable, found {type(loss).__name__}")


def _from_module(module: nn.Module) -> Loss:
    name = type(module).__name__
    if getattr(module, "reduction", "mean") not in ("mean", "batchmean"):
        raise ModelError(
            f"the loss {name}(reduction={module.reduction!r}) gives no mean over the samples",
            do="use reduction='mean', or a callable that returns (sum, weight)",
        )
    if type(module) is nn.CrossEntropyLoss:
        return Loss(name, _weighted(module, F.cross_entropy), module.ignore_index, module)
    if type(module) is nn.NLLLoss:
        return Loss(name, _weighted(module, F.nll_loss), module.ignore_index, module)
    return Loss(name, own=module)


def _weighted(module: nn.Module, loss: Callable[..., torch.Tensor]) -> _Function:
    names = ("weight", "ignore_index", "label_smoothing")

    def function(output: Any, target: Any, reduction: str) -> torch.Tensor:
        if module.weight is not None and module.weight.device != output.device:
            module.to(output.device)
        options = {name: getattr(module, name) for name in names if hasattr(module, name)}
        return loss(output, target, reduction=reduction, **options)

    return function
