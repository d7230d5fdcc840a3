"""The loss of each sample alone, and the class that a model predicts for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from flatout.data import Batch
from flatout.errors import ModelError
from flatout.models import sample_losses
from flatout.train.losses.losses import Loss

Kind = Literal["classes", "binary", ""]


class SampleLoss(NamedTuple):
    """Computes the loss of each sample, to find the samples with the highest loss.

    Attributes:
        values: function of an output and its batch that returns a loss per sample, of shape
            (samples,).
        kind: "classes" if the output has a score for each class, "binary" if it has one number; ""
            if that is unknown.
        is_logits: whether scores are logits; False if they are probabilities.
    """

    values: Callable[[Any, Batch], torch.Tensor]
    kind: Kind
    is_logits: bool = True

    def compared(self, output: torch.Tensor, target: torch.Tensor) -> tuple[Any, Any, Any]:
        """Return target and prediction as plain values, and the predicted class's probability."""
        if self.kind == "classes" and output.dim() == 1:
            # softmax turns log-probabilities into probabilities too.
            shares = output.softmax(0) if self.is_logits else output
            predicted = int(shares.argmax())
            true = int(target.argmax()) if target.numel() > 1 else int(target)
            return true, predicted, float(shares[predicted])
        if self.kind == "binary" and output.numel() == 1:
            share = float(output.sigmoid() if self.is_logits else output)
            return int(target), int(share > 0.5), max(share, 1 - share)
        is_single = output.numel() == 1 and target.numel() == 1
        return (target.item(), output.item(), None) if is_single else (None, None, None)


def of_loss(loss: Loss) -> SampleLoss:
    """Return the sample loss for a Trainer's single loss."""
    binary = loss.name == "binary_cross_entropy"
    kind: Kind = "classes" if loss.ignore_index is not None else "binary" if binary else ""
    return SampleLoss(partial(_values, loss), kind)


def of_compiled(model: Any) -> SampleLoss:
    """Return the sample loss for a Keras model's single compiled loss."""
    values, name, is_logits = sample_losses(model)
    kind: Kind = "binary" if "binary" in name else "classes" if "categorical" in name else ""

    def of_batch(output: Any, batch: Batch) -> torch.Tensor:
        _check(output, batch)
        return values(batch.targets, output)

    return SampleLoss(of_batch, kind, is_logits)


def _values(loss: Loss, output: Any, batch: Batch) -> torch.Tensor:
    _check(output, batch)
    output = output.float() if output.is_floating_point() else output
    if loss.own is None:
        assert loss.function is not None
        target: Any = batch.targets
        if loss.ignore_index is not None and not target.is_floating_point():
            target = target.long()
        return loss.function(output, target, "none").reshape(batch.size, -1).mean(1)
    alone = batch._replace(weight=None, padding=0)
    values = [loss(output[at : at + 1], alone.rows(at, at + 1)) for at in range(batch.size)]
    return torch.stack([v[0] / v[1] if isinstance(v, tuple) else v for v in values]).reshape(-1)


def _check(output: Any, batch: Batch) -> None:
    if not torch.is_tensor(output) or not torch.is_tensor(batch.targets):
        raise ModelError("the worst samples are found for one output tensor and one target tensor")
