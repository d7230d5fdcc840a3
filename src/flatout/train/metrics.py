"""Metrics that wait: updated on the device in each step, read once at the end.

A metric is a name, a torchmetrics Metric, or a callable `(output, target)` that gives a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from flatout.data.batch import Batch
from flatout.errors import ModelError
from flatout.train.tally import Tally

Given = str | Callable[[Any, Any], Any]


class Metric(Protocol):
    """What fit and evaluate need of a metric."""

    def update(self, output: Any, batch: Batch) -> None:
        """Take one batch's outputs; must not read from the device."""

    def compute(self) -> float:
        """The value over all batches since `reset`; NaN without any."""

    def reset(self) -> None:
        """Forget all batches."""

    def state_dict(self) -> Any:
        """What a checkpoint in the middle of an epoch needs."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""


class MeanOf:
    """The mean over samples of a per-batch mean."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function
        self._tally = Tally()

    def update(self, output: Any, batch: Batch) -> None:
        """Add `function(output, targets)`, weighed by the number of samples."""
        value = self._function(output, batch.targets)
        self._tally.add(torch.as_tensor(value).detach(), batch.size)

    def compute(self) -> float:
        """The mean so far."""
        return self._tally.mean()

    def reset(self) -> None:
        """Forget all batches."""
        self._tally.reset()

    def state_dict(self) -> Any:
        """Total and weight."""
        return self._tally.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        self._tally.load_state_dict(state)


class FromTorchmetrics:
    """A torchmetrics Metric, fed with outputs and targets."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._any = False

    def update(self, output: Any, batch: Batch) -> None:
        """Feed `metric.update(output, targets)` on the output's device."""
        if not self._any:
            self._metric.to(output.device if torch.is_tensor(output) else "cpu")
            self._any = True
        self._metric.update(output, batch.targets)

    def compute(self) -> float:
        """The metric's value; it must be one number."""
        if not self._any:
            return float("nan")
        value = self._metric.compute()
        if not torch.is_tensor(value) or value.numel() != 1:
            raise ModelError(
                f"the metric {type(self._metric).__name__} gives {value!r}, not one number",
                do="choose an average, as in average='macro'",
            )
        return float(value)

    def reset(self) -> None:
        """Forget all batches."""
        self._metric.reset()
        self._any = False

    def state_dict(self) -> Any:
        """The metric's state tensors."""
        state = dict(self._metric.metric_state)
        return {"any": self._any, "count": self._metric._update_count, "state": state}

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        self._any = state["any"]
        self._metric._update_count = state["count"]
        for name, value in state["state"].items():
            setattr(self._metric, name, value)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Share of right answers.

    Args:
        output: scores, shape (samples, classes, ...), or logits of one shape with `target`.
        target: class numbers, shape (samples, ...); class probabilities in the shape of the
            scores; or 0 and 1 for logits.
    """
    if output.shape == target.shape and output.dim() > 1 and output.shape[1] > 1:
        return (output.argmax(1) == target.argmax(1)).float().mean()
    if output.numel() == target.numel():
        return ((output.reshape(target.shape) > 0) == (target > 0.5)).float().mean()
    return (output.argmax(1) == target).float().mean()


def _auc() -> Any:
    from torchmetrics.classification import BinaryAUROC

    return BinaryAUROC()


_NAMES: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: MeanOf(accuracy),
    "auc": lambda: FromTorchmetrics(_auc()),
    "mse": lambda: MeanOf(lambda o, t: torch.nn.functional.mse_loss(o.reshape(t.shape), t)),
    "mae": lambda: MeanOf(lambda o, t: torch.nn.functional.l1_loss(o.reshape(t.shape), t)),
}


def as_metrics(given: Iterable[Given] | Mapping[str, Given]) -> dict[str, Metric]:
    """Metrics by name, fresh ones at each call.

    Raises:
        ModelError: for an unknown name.
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        return {name: _one(metric) for name, metric in given.items()}
    return {_name(metric): _one(metric) for metric in given}


def _name(metric: Given) -> str:
    if isinstance(metric, str):
        return metric
    return getattr(metric, "__name__", type(metric).__name__.lower())


def _one(metric: Given) -> Metric:
    if isinstance(metric, str):
        if metric not in _NAMES:
            raise ModelError(
                f"unknown metric {metric!r}; known: {', '.join(_NAMES)}",
                do="use one of these names, a torchmetrics Metric, or a callable (output, target)",
            )
        return _NAMES[metric]()
    if hasattr(metric, "metric_state"):
        return FromTorchmetrics(metric.clone())  # type: ignore[attr-defined]
    if callable(metric):
        return MeanOf(metric)
    raise ModelError(f"a metric is a name or a callable, found {type(metric).__name__}")
