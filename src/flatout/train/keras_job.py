"""A compiled Keras model as fit and evaluate need it: its own loss, metrics and their semantics."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from flatout.data.batch import Batch, map_tensors
from flatout.data.sources.keras_data import WEIGHTS
from flatout.models.keras_rewrites import training_step
from flatout.train.keras_slow_metrics import SlowMetrics
from flatout.train.losses import Value
from flatout.world import ONE, World

_HALF = (torch.bfloat16, torch.float16)


class KerasJob:
    """Forward, the compiled loss with all that layers add to it, and the compiled metrics.

    The metrics are the model's own objects, as in Keras: one job uses them at a time. They are
    updated in each step and read when somebody asks.

    Args:
        model: built and compiled.
        training: whether layers behave as in training.
        slow_metrics: times the metrics in training, and feeds those that are slow less often.
    """

    def __init__(
        self, model: Any, *, training: bool, slow_metrics: SlowMetrics | None = None
    ) -> None:
        self._model = model
        self._slow = slow_metrics
        self._training = training
        self._computes_own = _is_overridden(model, "compute_metrics")
        self._own_results: dict[str, Any] = {}

    def compute(self, batch: Batch) -> Value:
        """The batch's loss; its outputs go to the metrics."""
        if self._slow is not None and self._training:
            self._slow.step_begins()
        model, x = self._model, batch.inputs
        y, weight = targets_of(batch)
        with training_step() if self._training else nullcontext():
            y_pred = in_full_precision(call(model, x, training=self._training))
        loss: torch.Tensor = model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=weight, training=self._training
        )
        with torch.no_grad():
            self._update(x, y, _with_masks(torch.Tensor.detach, y_pred), weight)
        return loss

    def _update(self, x: Any, y: Any, y_pred: Any, weight: Any) -> None:
        model = self._model
        if self._computes_own:
            self._own_results = model.compute_metrics(x, y, y_pred, sample_weight=weight)
        elif model._compile_metrics is not None:
            model._compile_metrics.update_state(y, y_pred, weight)

    def results(self, world: World = ONE) -> dict[str, float]:
        """The metrics over all batches since `reset`, by Keras' names; without the loss."""
        if self._slow is not None:
            self._slow.flush()
        found = self._own_results if self._computes_own else self._model.get_metrics_result()
        plain: dict[str, float] = {}
        for name, value in found.items():
            for own, number in value.items() if isinstance(value, dict) else [(name, value)]:
                if own != "loss":
                    plain[own] = as_number(number)
        return plain

    def reset(self) -> None:
        """Forget all batches."""
        if self._slow is not None:
            self._slow.forget()
        self._model.reset_metrics()
        self._own_results = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """The metrics' variables, in their order."""
        if self._slow is not None:
            self._slow.flush()
        return [{str(n): v.value.detach().clone() for n, v in enumerate(self._variables())}]

    @torch.no_grad()
    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from there; a compiled model has one rank."""
        [state] = states
        for number, variable in enumerate(self._variables()):
            if str(number) in state:
                variable.value.copy_(state[str(number)])

    def _variables(self) -> list[Any]:
        return [v for metric in self._model.metrics for v in metric.variables]


def compiled_metrics(model: Any) -> list[Any]:
    """The metrics of `compile`, once they are built."""
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return []
    lists = [*compiled._flat_metrics, *compiled._flat_weighted_metrics]
    return [metric for listed in lists if listed is not None for metric in listed.metrics]


def call(model: Any, inputs: Any, *, training: bool) -> Any:
    """The model's outputs for a batch's inputs."""
    return model(inputs, training=training) if model._call_has_training_arg else model(inputs)


def targets_of(batch: Batch) -> tuple[Any, Any]:
    """Targets and sample weights of a batch, either of them None where there are none."""
    targets = batch.targets
    if isinstance(targets, dict) and WEIGHTS in targets:
        return targets["targets"], targets[WEIGHTS]
    return targets, batch.weight


def in_full_precision(outputs: Any) -> Any:
    """The same outputs in float32 where autocast made them half: losses are computed there.

    A half precision that the user asked Keras for, by a policy, is left alone.
    """
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return outputs
    return _with_masks(lambda t: t.float() if t.dtype in _HALF else t, outputs)


def _with_masks(function: Callable[[torch.Tensor], torch.Tensor], outputs: Any) -> Any:
    """`function` of each tensor, with the mask that Keras fastened to it."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        result, mask = function(tensor), getattr(tensor, "_keras_mask", None)
        if mask is not None:
            result._keras_mask = mask  # type: ignore[attr-defined]
        return result

    return map_tensors(apply, outputs)


def as_number(value: Any) -> Any:
    """A metric's result as a float; what is not one number stays as it is."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _is_overridden(model: Any, name: str) -> bool:
    """Whether the user's class has its own version of one of Keras' methods."""
    return not getattr(type(model), name).__module__.startswith("keras.")
