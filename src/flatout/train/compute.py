"""Forward and loss of one batch, as the Trainer runs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from flatout.data import Batch, Features, Source, rows_of_samples
from flatout.errors import FlatoutError
from flatout.train.broadcast import no_broadcast
from flatout.train.checks import MISFITS, check_all_labels, check_targets, loss_misfit
from flatout.train.class_weight import ClassWeight
from flatout.train.losses import Loss, Value
from flatout.train.metrics import MeanOf, Metric
from flatout.train.micro_batch import is_out_of_memory
from flatout.train.step import Compute


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(x)`, `model(*tuple)` or `model(**mapping)`; features are one argument."""
    if torch.is_tensor(inputs) or isinstance(inputs, Features):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs)


def build_compute(
    model: nn.Module,
    loss: Loss,
    metrics: Iterable[Metric],
    *,
    unweighted: bool,
    weigh: ClassWeight | None = None,
    source: Source | None = None,
) -> Compute:
    """The function that a step differentiates.

    The targets of the first batch are looked at before the loss sees them, and on this batch the
    user's own functions are watched for shapes that broadcast. Later ones are looked at only when
    the loss has failed, which costs a step nothing.

    Args:
        model: called with the batch's inputs.
        loss: compares output and targets.
        metrics: fed with each output; nothing is read from the device.
        unweighted: no target of the source is one that the loss ignores.
        weigh: adds weights to a batch's samples, for the loss.
        source: all of whose labels are looked at with the first batch, or None.
    """
    metrics = list(metrics)
    unseen: int | None = None

    def compute(batch: Batch) -> Value:
        nonlocal unseen
        output = call(model, batch.inputs)
        watches = unseen is None or unseen > 0
        if watches:  # the first batch may come in pieces
            unseen = (unseen or batch.whole or batch.size) - batch.size
            check_all_labels(loss, output, source)
            if weigh is not None:
                weigh.check(output)
        weighed = batch if weigh is None else weigh(batch)
        value = value_of(loss, output, weighed, watches, unweighted)
        if metrics and not batch.is_copy and batch.samples:
            feed(metrics, output, batch, watches)
        return value

    return compute


def value_of(loss: Loss, output: Any, batch: Batch, watches: bool, unweighted: bool) -> Value:
    """The loss of one output; what does not fit is explained, the first time before it is tried.

    Raises:
        FlatoutError: output and targets are not what the loss compares.
    """
    try:
        if watches:
            check_targets(loss, output, batch)
        if watches and loss.own is not None:
            with no_broadcast(f"the loss {loss.name}", output, batch):
                return loss(output, batch, unweighted=unweighted)
        return loss(output, batch, unweighted=unweighted)
    except MISFITS as error:
        if isinstance(error, FlatoutError) or is_out_of_memory(error):
            raise
        raise loss_misfit(error, loss, output, batch) from error


@torch.no_grad()
def feed(metrics: list[Metric], output: Any, batch: Batch, watches: bool) -> None:
    """Show metrics an output and what it is compared with; `watches` for shapes that broadcast."""
    detached = output.detach() if torch.is_tensor(output) else output
    detached, batch = rows_of_samples(detached, batch), batch.without_padding()
    for metric in metrics:
        if watches and isinstance(metric, MeanOf):
            with no_broadcast(f"the metric {metric.name}", detached, batch):
                metric.update(detached, batch)
        else:
            metric.update(detached, batch)
