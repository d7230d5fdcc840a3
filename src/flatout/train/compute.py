"""Forward and loss of one batch, as the Trainer runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from flatout.data import Batch, Features, Source, rows_of_samples
from flatout.errors import FlatoutError
from flatout.train.checks import MISFITS, check_all_labels, check_targets, loss_misfit
from flatout.train.losses.broadcast import no_broadcast
from flatout.train.losses.class_weight import ClassWeight
from flatout.train.losses.losses import Loss, Value
from flatout.train.losses.metrics import MeanOf, Metric
from flatout.train.micro_batch import is_out_of_memory


def call(model: nn.Module, inputs: Any) -> Any:
    """Call the model as `model(x)`, `model(*tuple)` or `model(**mapping)`.

    Features and packed sequences are passed as a single argument.
    """
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, (Features, PackedSequence)):
        return model(*inputs)
    return model(inputs)


class ModelCompute:
    """The function of a batch that a step differentiates.

    The targets of the first batch are checked before the loss gets them. On this batch, the user's
    own functions are also checked for shapes that broadcast. Later batches are checked only after
    the loss has failed, so they cost no time.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        metrics: Iterable[Metric],
        *,
        unweighted: bool,
        weigh: ClassWeight | None = None,
        source: Source | None = None,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._model, self._loss, self._weigh, self._source = model, loss, weigh, source
        self.metrics = list(metrics)
        self._unweighted, self._prepare = unweighted, prepare
        self._unseen: int | None = None

    def __call__(self, batch: Batch) -> Value:
        """Return the loss of a batch, and feed the output to the metrics."""
        batch = self._prepare(batch)
        output = call(self._model, batch.inputs)
        watches = self._unseen is None or self._unseen > 0
        if watches:  # the first batch may be split into micro-batches
            self._unseen = (self._unseen or batch.whole or batch.size) - batch.size
            check_all_labels(self._loss, output, self._source)
            if self._weigh is not None:
                self._weigh.check(output)
        weighed = batch if self._weigh is None else self._weigh(batch)
        value = value_of(self._loss, output, weighed, watches, self._unweighted)
        if self.metrics and not batch.is_copy and batch.samples:
            feed(self.metrics, output, batch, watches)
        return value

    def traced(self, batch: Batch) -> tuple[Value, Any]:
        """Return loss and output of a batch like earlier ones, as a function of tensors alone."""
        batch = self._prepare(batch)
        output = call(self._model, batch.inputs)
        weighed = batch if self._weigh is None else self._weigh(batch)
        return self._loss(output, weighed, unweighted=self._unweighted), output

    def feed(self, output: Any, batch: Batch) -> None:
        """Feed an output that was computed elsewhere to the metrics."""
        feed(self.metrics, output, self._prepare(batch), False)

    @property
    def own(self) -> Callable[[Any, Any], Value] | None:
        """The loss if it is the user's own function, and not torch's; else None."""
        own = self._loss.own
        places = (type(own).__module__, getattr(own, "__module__", None) or "")
        return None if any(place.startswith("torch.nn.") for place in places) else own

    @property
    def own_parts(self) -> list[Any]:
        """The user's own objects that are called."""
        return [self._model, self._loss, *self.metrics]

    @property
    def hindrance(self) -> str:
        """Reason why `traced` may depend on more than tensors and modules; "" without one."""
        return "" if self.own is None else f"the loss {self._loss.name} is your own function"

    @property
    def modules(self) -> list[nn.Module]:
        """All modules of the model and the loss."""
        parts = (self._model, self._loss.module, self._loss.own)
        return [m for part in parts if isinstance(part, nn.Module) for m in part.modules()]


def value_of(loss: Loss, output: Any, batch: Batch, watches: bool, unweighted: bool) -> Value:
    """Return the loss of one output; explain errors, and check the first batch beforehand."""
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
    """Feed an output and its targets to metrics; `watches` for shapes that broadcast."""
    detached = output.detach() if torch.is_tensor(output) else output
    detached, batch = rows_of_samples(detached, batch), batch.without_padding()
    for metric in metrics:
        if watches and isinstance(metric, MeanOf):
            with no_broadcast(f"the metric {metric.name}", detached, batch):
                metric.update(detached, batch)
        else:
            metric.update(detached, batch)
