"""Metrics that are updated on the device in each step, and read once at the end.

A metric is a name, a torchmetrics Metric, or a callable `(output, target)`. A callable returns a
mean over the samples or, like a loss, (sum, weight).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from flatout.data import Batch
from flatout.errors import ModelError
from flatout.train.losses.confusion import ConfusionCount
from flatout.train.losses.losses import in_shape_of
from flatout.train.running_mean import RunningMean, mean_of

Given = str | Callable[[Any, Any], Any]


class Metric(Protocol):
    """The interface of a metric in fit and evaluate."""

    def update(self, output: Any, batch: Batch) -> None:
        """Add the outputs of one batch; an implementation must not wait for the device."""

    def compute(self, states: Sequence[Any] | None = None) -> float:
        """Return the value over all batches since `reset`; NaN without any."""

    def reset(self) -> None:
        """Forget all batches."""

    def state_dict(self) -> Any:
        """Return the state that a checkpoint within an epoch needs."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of `state_dict`."""

    @property
    def is_of_samples(self) -> bool:
        """Whether the value is known not to depend on the division of samples into batches."""


class Mean(RunningMean):
    """A mean over all batches, as a metric."""

    is_of_samples = True

    def compute(self, states: Sequence[Any] | None = None) -> float:
        """Return the mean so far, or the mean over `states`; NaN where nothing was counted."""
        return self.mean() if states is None else mean_of(states)


class MeanOf(Mean):
    """The mean over all batches of a per-batch mean, or of a per-batch (sum, weight).

    Attributes:
        name: name of the metric's function.
    """

    def __init__(self, function: Callable[[Any, Any], Any], is_of_samples: bool = False) -> None:
        super().__init__()
        self._function = function
        self.is_of_samples = is_of_samples
        self.name = getattr(function, "__name__", type(function).__name__)

    @property
    def own_parts(self) -> list[Any]:
        """The user's own objects that this metric calls."""
        return [self._function]

    def update(self, output: Any, batch: Batch) -> None:
        """Add `function(output, targets)`; a mean is weighed by the number of samples."""
        self.take(self._function(output, batch.targets), batch.size)


# Modules of torchmetrics whose metrics add up, or keep, the values of samples.
_OF_SAMPLES = ("torchmetrics.classification.", "torchmetrics.regression.")


class FromTorchmetrics:
    """A torchmetrics Metric, fed with outputs and targets."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._any = False
        self.is_of_samples = type(metric).__module__.startswith(_OF_SAMPLES)

    @property
    def own_parts(self) -> list[Any]:
        """The user's own objects that this metric calls."""
        return [self._metric]

    def update(self, output: Any, batch: Batch) -> None:
        """Feed `metric.update(output, targets)` on the output's device."""
        if torch.is_tensor(output) and self._metric.device != output.device:
            self._metric.to(output.device)
        self._any = True
        self._metric.update(output, batch.targets)

    def compute(self, states: Sequence[Any] | None = None) -> float:
        """Return the metric's value, a number, from its own state or from merged `states`."""
        metric = self._metric if states is None else self._merged(states)
        if metric is None or not (self._any or states):
            return float("nan")
        value = metric.compute()
        if not torch.is_tensor(value) or value.numel() != 1:
            raise ModelError(
                f"the metric {type(self._metric).__name__} gives {value!r}, not one number",
                do="choose an average, as in average='macro'",
            )
        return float(value)

    def _merged(self, states: Sequence[Any]) -> Any:
        states = [state for state in states if state["any"]]
        if not states:
            return None
        metric = self._metric.clone()
        # The states of all ranks are merged here already.
        metric._to_sync = False
        metric._update_count = sum(state["count"] for state in states)
        for name, reduction in self._metric._reductions.items():
            values = [_copied(state["state"][name], metric.device) for state in states]
            if isinstance(values[0], list):
                merged: Any = [part for value in values for part in value]
            elif len(values) == 1:
                merged = values[0]
            else:
                merged = torch.stack(values)
                merged = reduction(merged) if callable(reduction) else merged
            setattr(metric, name, merged)
        return metric

    def reset(self) -> None:
        """Forget all batches."""
        self._metric.reset()
        self._any = False

    def state_dict(self) -> Any:
        """Return the metric's state tensors."""
        state = {name: _copied(value) for name, value in self._metric.metric_state.items()}
        return {"any": self._any, "count": self._metric._update_count, "state": state}

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of `state_dict`."""
        self._any = state["any"]
        self._metric._update_count = state["count"]
        for name, value in state["state"].items():
            setattr(self._metric, name, _copied(value, self._metric.device))


def _copied(value: Any, device: torch.device | None = None) -> Any:
    if isinstance(value, list):
        return [_copied(part, device) for part in value]
    return value.detach().to(device, copy=True)


class Auc:
    """Area under the ROC curve of two classes, over all samples at once.

    Outputs are one score per sample, or two scores: of class 0 and of class 1. Targets are 0 and 1.
    Scores are kept until the end, 8 bytes a sample, for scikit-learn's `roc_auc_score`.
    """

    is_of_samples = True

    def __init__(self) -> None:
        self._scores: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []

    def update(self, output: Any, batch: Batch) -> None:
        """Keep the batch's scores and targets."""
        assert isinstance(batch.targets, torch.Tensor)
        score = (
            output[:, 1] - output[:, 0] if output.dim() == 2 and output.shape[1] == 2 else output
        )
        if score.numel() != batch.targets.numel():
            raise ModelError(
                f"auc takes one or two scores per sample, found output {tuple(output.shape)} "
                f"for target {tuple(batch.targets.shape)}",
                do="use it with two classes, or torchmetrics' AUROC(task='multiclass', ...)",
            )
        self._scores.append(score.float().flatten().clone())
        self._targets.append(batch.targets.float().flatten().clone())

    def compute(self, states: Sequence[Any] | None = None) -> float:
        """Return the area so far, or over `states`; NaN where one class is missing."""
        from sklearn.metrics import roc_auc_score

        states = [self.state_dict()] if states is None else states
        kept = [part for state in states for part in state["scores"]]
        if not kept:
            return float("nan")
        scores = _joined(kept)
        targets = _joined([part for state in states for part in state["targets"]]) > 0.5
        if bool(targets.all()) or not bool(targets.any()):
            return float("nan")
        return float(roc_auc_score(targets.numpy(), scores.numpy()))

    def reset(self) -> None:
        """Forget all batches."""
        self._scores.clear()
        self._targets.clear()

    def state_dict(self) -> Any:
        """Return all scores and targets so far."""
        return {"scores": list(self._scores), "targets": list(self._targets)}

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of `state_dict`."""
        self._scores, self._targets = list(state["scores"]), list(state["targets"])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.to(parts[-1].device) for part in parts]).cpu()


def accuracy(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the number of correct predictions, and the number of predictions that count."""
    are_scores = output.dim() > 1 and output.shape[1] > 1
    if output.shape == target.shape and are_scores and target.is_floating_point():
        right = output.argmax(1) == target.argmax(1)
        return right.sum(), right.numel()
    if output.numel() == target.numel():
        right = (output.reshape(target.shape) > 0) == (target > 0.5)
        return right.sum(), right.numel()
    answers = output.argmax(1)
    if answers.numel() != target.numel():
        raise ModelError(
            f"accuracy cannot compare output {tuple(output.shape)} and target "
            f"{tuple(target.shape)}",
            do="let the model return (samples, classes, ...) for targets (samples, ...)",
        )
    target = target.reshape(answers.shape)
    return (answers == target).sum(), (target != -100).sum()


def _error_of(function: Callable[..., torch.Tensor]) -> Metric:
    def error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        return function(in_shape_of(output, target), target.to(output.dtype))

    return MeanOf(error, is_of_samples=True)


_NAMES: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: MeanOf(accuracy, is_of_samples=True),
    "auc": Auc,
    "confusion": ConfusionCount,
    "mse": lambda: _error_of(torch.nn.functional.mse_loss),
    "mae": lambda: _error_of(torch.nn.functional.l1_loss),
}


def as_metrics(given: Iterable[Given] | Mapping[str, Given]) -> dict[str, Metric]:
    """Return new metrics by name."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        return {name: _metric_of(metric) for name, metric in given.items()}
    return {_name(metric): _metric_of(metric) for metric in given}


def _name(metric: Given) -> str:
    if isinstance(metric, str):
        return "mean_recall" if metric == "confusion" else metric
    return getattr(metric, "__name__", type(metric).__name__.lower())


def _metric_of(metric: Given) -> Metric:
    if isinstance(metric, str):
        if metric not in _NAMES:
            raise ModelError(
                f"unknown metric {metric!r}; known: {', '.join(_NAMES)}",
                do="use one of these names, a torchmetrics Metric, or a callable (output, target)",
            )
        return _NAMES[metric]()
    if hasattr(metric, "metric_state") and hasattr(metric, "items"):
        raise ModelError(
            f"a {type(metric).__name__} gives several numbers at once",
            do="pass its metrics by name: metrics=dict(collection)",
        )
    if hasattr(metric, "metric_state"):
        return FromTorchmetrics(metric.clone())  # type: ignore[attr-defined]
    if callable(metric):
        return MeanOf(metric)
    raise ModelError(f"a metric is a name or a callable, found {type(metric).__name__}")
