"""A model of several outputs, each with a loss, a weight of that loss, and its own metrics.

The total is the sum of weight times loss. Each loss is divided by its own weight: an output may
ignore labels that count in another output. If a step is computed in parts (micro-batches,
accumulated batches, ranks), the divisor of each loss is therefore summed over the whole step before
the first part. The sum needs targets and sample weights alone.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.data import Batch
from flatout.errors import FlatoutError, ModelError
from flatout.train.compute import call, feed, value_of
from flatout.train.losses.class_weight import ClassWeight
from flatout.train.losses.loss_value import Weighing
from flatout.train.losses.losses import Loss, Value, as_loss
from flatout.train.losses.metrics import Mean, Metric, as_metrics
from flatout.train.running_mean import TINY, mean_of, not_zero


class SeveralLosses:
    """A loss for each of several outputs, by name."""

    def __init__(
        self, given: Mapping[str, Any], weights: Mapping[str, float] | None = None
    ) -> None:
        if not given:
            raise ModelError("loss is an empty dict: expected a loss for each output, by name")
        self.parts: dict[str, Loss] = {name: as_loss(loss) for name, loss in given.items()}
        weights = {} if weights is None else weights
        if not isinstance(weights, Mapping):
            raise ModelError(
                f"loss_weights map outputs to numbers, found a {type(weights).__name__}",
                do=f"give them by name: {dict.fromkeys(self.parts, 1.0)}",
            )
        check_names("loss_weights", weights, self.parts)
        for name, weight in weights.items():
            if not isinstance(weight, numbers.Real) or not math.isfinite(weight):
                raise ModelError(f"loss_weights[{name!r}] is {weight!r}, expected a number")
        self.weights = {name: float(weights.get(name, 1.0)) for name in self.parts}

    def of(self, what: str, value: Any, name: str) -> Any:
        """Return the part of outputs or targets that belongs to an output."""
        if isinstance(value, Mapping):
            if name in value:
                return value[name]
            result = f"a dict of {', '.join(map(repr, value)) or 'nothing'}"
        elif hasattr(value, "_fields") and name in value._fields:
            return getattr(value, name)
        elif isinstance(value, (tuple, list)):
            if len(value) == len(self.parts):
                return value[list(self.parts).index(name)]
            result = f"{len(value)} parts"
        else:
            result = f"a {type(value).__name__}"
        raise ModelError(
            f"loss names {len(self.parts)} outputs ({', '.join(map(repr, self.parts))}), and the "
            f"{what} are {result}",
            do=f"let the {what} be a dict by these names, or a tuple in their order",
        )


def check_names(argument: str, given: Iterable[str], outputs: Iterable[str]) -> None:
    """Refuse names that are not among the outputs."""
    outputs = list(outputs)
    unknown = [name for name in given if name not in outputs]
    if unknown:
        raise ModelError(
            f"{argument} names {unknown[0]!r}, and the outputs that have a loss are "
            f"{', '.join(map(repr, outputs))}"
        )


class OutputMetrics:
    """Metrics of each output, and metrics of all outputs together."""

    def __init__(self, given: Any, outputs: Iterable[str]) -> None:
        outputs = list(outputs)
        if not isinstance(given, Mapping):
            if not list(given):
                given = {}
            else:
                raise ModelError(
                    "with a loss for each output, metrics are given by output too",
                    do=f"write metrics={{{outputs[0]!r}: [...]}}",
                )
        whole = {name: metric for name, metric in given.items() if name not in outputs}
        check_names("metrics", [n for n, m in whole.items() if not callable(m)], outputs)
        self.of_output = {
            name: as_metrics([given[name]] if callable(given[name]) else given[name])
            for name in outputs
            if name in given
        }
        self.of_all = as_metrics(whole)

    def by_name(self) -> dict[str, Metric]:
        """Return every metric by its name in the History, such as "a_accuracy"."""
        named = {
            f"{output}_{name}": metric
            for output, metrics in self.of_output.items()
            for name, metric in metrics.items()
        }
        return named | self.of_all


class PartLoss(Mean):
    """The mean of an output's loss over all batches, as a metric that receives loss values."""

    def update(self, output: Any, batch: Batch) -> None:
        """Do nothing, since the loss has been computed already."""


class SeveralCompute(Weighing):
    """Forward and total loss of a batch, which a step differentiates."""

    def __init__(
        self,
        model: nn.Module,
        losses: SeveralLosses,
        metrics: OutputMetrics,
        class_weight: Mapping[str, ClassWeight],
        narrow: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._model = model
        self._losses = losses
        self._metrics = metrics
        self._class_weight = class_weight
        self._narrow = narrow
        self._unseen: int | None = None
        # By name of a loss, the number of samples divided by the loss's weight in the present step;
        # None for whole batches.
        self._shares: dict[str, torch.Tensor] | None = None
        self.part_losses = {name: PartLoss() for name in losses.parts}

    def __call__(self, batch: Batch) -> Value:
        """Return the total loss: a mean over the samples, or its sum and their number."""
        batch = self._narrow(batch)
        outputs = call(self._model, batch.inputs)
        watches = self._unseen is None or self._unseen > 0
        if watches:
            self._unseen = (self._unseen or batch.whole or batch.size) - batch.size
        total: Any = 0.0
        for name, loss in self._losses.parts.items():
            output = self._losses.of("outputs", outputs, name)
            part = self._part(batch, name)
            with _named(name):
                if watches and name in self._class_weight:
                    self._class_weight[name].check(output)
                value = value_of(loss, output, part, watches, unweighted=False)
                total = total + self._losses.weights[name] * self._share_of(name, value, batch)
            if not batch.is_copy and batch.samples:
                self.part_losses[name].take(value, batch.samples)
                feed(list(self._metrics.of_output.get(name, {}).values()), output, part, watches)
        if self._metrics.of_all and not batch.is_copy and batch.samples:
            feed(list(self._metrics.of_all.values()), outputs, batch, watches)
        return total if self._is_mean(batch) else (total, float(batch.samples))

    @property
    def own_parts(self) -> list[Any]:
        """The user's own objects that are called."""
        return [self._model, *self._losses.parts.values(), *self._metrics.by_name().values()]

    def sums_of_weights(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return the divisor of each loss over these batches, and the number of samples."""
        counted: list[Any] = []
        for name, loss in self._losses.parts.items():
            parts = [(self._part(batch, name), batch.copies) for batch in batches]
            counted.append(sum(loss.weight_of(part) / copies for part, copies in parts))
        counted.append(sum(batch.samples / batch.copies for batch in batches))
        device = next((c.device for c in counted if torch.is_tensor(c)), None)
        return torch.stack(
            [torch.as_tensor(c, dtype=torch.float64, device=device) for c in counted]
        )

    @contextmanager
    def of_step(self, sums: torch.Tensor) -> Iterator[None]:
        """Treat batches within this context as parts of a step with these sums of weights."""
        shares = sums[-1] / sums[:-1].clamp_min(TINY)
        self._shares = dict(zip(self._losses.parts, shares.unbind(), strict=True))
        try:
            yield
        finally:
            self._shares = None

    def _part(self, batch: Batch, name: str) -> Batch:
        part = batch._replace(targets=self._losses.of("targets", batch.targets, name))
        weigh = self._class_weight.get(name)
        return part if weigh is None else weigh(part)

    def _is_mean(self, batch: Batch) -> bool:
        return self._shares is None and not batch.padding

    def _share_of(self, name: str, value: Value, batch: Batch) -> torch.Tensor:
        if self._shares is None:
            mean = value[0] / not_zero(value[1]) if isinstance(value, tuple) else value
            return mean if self._is_mean(batch) else mean * batch.samples
        share = self._shares[name]
        if not isinstance(value, tuple):
            return value * batch.size * share.to(value.dtype)
        total, weight = value
        is_known = self._losses.parts[name].own is None or (
            not torch.is_tensor(weight) and weight == batch.samples
        )
        if not is_known:
            raise ModelError(
                "the loss returns its own weight, which is known only after the forward "
                "pass, and this step is computed in parts",
                do="return a mean over the samples, use a standard loss, or give one loss for all "
                "outputs together: a callable (outputs, targets) that returns (sum, weight)",
            )
        return total * share.to(total.dtype)


def total_of(losses: SeveralLosses, states: Sequence[Mapping[str, Any]]) -> float:
    """Return the total of the losses in `states`; a loss that counted nothing adds zero."""
    total = 0.0
    for name, weight in losses.weights.items():
        own = [state[f"{name}_loss"] for state in states if f"{name}_loss" in state]
        if any(state["weight"] for state in own):
            total += weight * mean_of(own)
    return total


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except FlatoutError as error:
        raise type(error)(
            f"output {name!r}: {error.what}", where=error.where, do=error.do
        ) from error.__cause__
