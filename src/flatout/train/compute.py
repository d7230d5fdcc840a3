"""Forward and loss of one batch, as the Trainer runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from flatout.data.batch import Batch
from flatout.train.losses import Loss, Value
from flatout.train.metrics import Metric
from flatout.train.step import Compute


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(x)`, `model(*tuple)` or `model(**mapping)`."""
    if torch.is_tensor(inputs):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs)


def build_compute(
    model: nn.Module, loss: Loss, metrics: Iterable[Metric], *, unweighted: bool
) -> Compute:
    """The function that a step differentiates.

    Args:
        model: called with the batch's inputs.
        loss: compares output and targets.
        metrics: fed with each output; nothing is read from the device.
        unweighted: no target of the source is one that the loss ignores.
    """
    metrics = list(metrics)

    def compute(batch: Batch) -> Value:
        return loss(call(model, batch.inputs), batch, unweighted=unweighted)

    def compute_with_metrics(batch: Batch) -> Value:
        output = call(model, batch.inputs)
        value = loss(output, batch, unweighted=unweighted)
        with torch.no_grad():
            detached = output.detach() if torch.is_tensor(output) else output
            for metric in metrics:
                metric.update(detached, batch)
        return value

    return compute_with_metrics if metrics else compute
