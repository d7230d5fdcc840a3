"""Adapter of a compiled Keras model for fit and evaluate, with `compile`'s loss and metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from flatout.data import Batch, map_tensors, rows_of_samples
from flatout.errors import ModelError
from flatout.models.keras.data import WEIGHTS
from flatout.models.keras.model import call, is_overridden
from flatout.models.keras.ranks import adds_up, over_all, put_back, shared_losses, whole_batch
from flatout.models.keras.rewrites import training_step
from flatout.models.keras.slow_metrics import SlowMetrics
from flatout.world import ONE, World

_HALF = (torch.bfloat16, torch.float16)
# A mean loss, or a pair of a sum of losses and its total weight.
Value = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]
# Inputs, targets, outputs and sample weights.
_Given = tuple[Any, Any, Any, Any]


class KerasJob:
    """Forward, the compiled loss including the losses of layers, and the compiled metrics.

    The metrics are the model's own objects, as in Keras, so only one job uses them at a time. They
    are updated in each step, and read on request.

    Args:
        model: a built and compiled model.
        training: whether layers behave as in training.
        slow_metrics: times the metrics in training, and updates slow metrics less often.
        together: function that returns the ranks that compute parts of the same batch at this
            moment.
        class_weight: weight by class number, for batches whose sample weights do not include class
            weights yet.
        also: function that gets the outputs and targets of this rank's samples, as the metrics do.
    """

    def __init__(
        self,
        model: Any,
        *,
        training: bool,
        slow_metrics: SlowMetrics | None = None,
        together: Callable[[], World] = lambda: ONE,
        class_weight: Mapping[int, float] | None = None,
        also: Callable[[Any, Any], None] | None = None,
    ) -> None:
        self._class_weight = class_weight
        self._also = also
        self._model = model
        self._slow = slow_metrics
        self._together = together
        self._training = training
        names = ("compute_metrics", "get_metrics_result")
        self._computes_own = any(is_overridden(model, name) for name in names)
        self._takes_shares = _takes(model, "categorical")
        self._own_results: dict[str, Any] = {}

    def compute(self, batch: Batch) -> Value:
        """Return the loss of a batch, and update the metrics with the model's outputs.

        If several ranks have parts of a batch, the mean of these losses over all samples is the
        loss of the whole batch.
        """
        self.step_begins()
        world = self._together()
        if world.size > 1:
            return self._compute_part(batch, world)
        loss, given = self._forward(batch)
        if batch.samples:
            self._update(*given)
            self._tell(given)
        return _of_samples(loss, batch)

    # A step whose forward is recorded once and run again uses these attributes.
    own, metrics = None, True

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Return the modules of the model."""
        return list(self._model.modules())

    @property
    def own_parts(self) -> list[Any]:
        """Return the user's own objects that are called."""
        return [self._model, getattr(self._model, "loss", None)]

    def step_begins(self) -> None:
        """Let the slow metrics measure the time of steps."""
        if self._slow is not None and self._training:
            self._slow.step_begins()

    def traced(self, batch: Batch) -> tuple[Value, Any]:
        """Return the loss of a batch that this rank has whole, and the inputs of the metrics."""
        loss, given = self._forward(batch)
        return _of_samples(loss, batch), given

    def feed(self, given: Any, batch: Batch) -> None:
        """Update the metrics with the output of `traced`."""
        self._update(*given)
        self._tell(given)

    def _tell(self, given: _Given) -> None:
        if self._also is not None:
            _, y, y_pred, _ = given
            self._also(y_pred, y)

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, _Given]:
        model = self._model
        if self._class_weight is not None:
            batch = _weighed(batch, self._class_weight, takes_numbers(model))
        with training_step() if self._training else nullcontext():
            y_pred = in_full_precision(call(model, batch.inputs, training=self._training))
        if batch.samples:
            y_pred, batch = _outputs_of_samples(y_pred, batch), batch.without_padding()
        else:
            batch = batch._replace(weight=None)  # padding only: its loss has no weight
        y, weight = self._targets(batch, y_pred)
        loss: torch.Tensor = model._compute_loss(
            x=batch.inputs, y=y, y_pred=y_pred, sample_weight=weight, training=self._training
        )
        y_pred = _with_masks(torch.Tensor.detach, y_pred)
        if batch.padding:  # drops the padding, so that it does not reach the metrics
            y_pred, batch = _outputs_of_samples(y_pred, batch), batch.without_padding()
            y, weight = self._targets(batch, y_pred)
        return loss, (batch.inputs, y, y_pred, weight)

    def _targets(self, batch: Batch, y_pred: Any) -> tuple[Any, Any]:
        y, weight = _weight_of_places(self._model, *targets_of(batch))
        if self._takes_shares and torch.is_tensor(y_pred):
            y = _as_shares(y, y_pred.shape[-1])
        return y, weight

    @torch.no_grad()
    def _update(self, x: Any, y: Any, y_pred: Any, weight: Any) -> None:
        model = self._model
        if self._computes_own:
            self._own_results = model.compute_metrics(x, y, y_pred, sample_weight=weight)
        elif model._compile_metrics is not None:
            model._compile_metrics.update_state(y, y_pred, weight)

    def _compute_part(self, batch: Batch, world: World) -> Value:
        # Another rank counts the same samples, also in the variables that the loss and layers
        # update.
        counted = self._summed() if batch.is_copy else []
        before = [variable.value.clone() for variable in counted]
        with shared_losses(world, batch):
            loss, given = self._forward(batch)
        put_back(counted, before)
        if not batch.is_copy and batch.samples:
            self._tell(given)
        if self._takes_whole_batches:
            if batch.copies == 1:
                x, *rest = given
                x = whole_batch(world, x) if self._computes_own else x
                given = (x, *whole_batch(world, tuple(rest)))
            self._update(*given)
        elif not batch.is_copy and batch.samples:
            self._update(*given)
        return _of_samples(loss, batch)

    @property
    def _takes_whole_batches(self) -> bool:
        return self._computes_own or not all(map(adds_up, compiled_metrics(self._model)))

    def _summed(self) -> list[Any]:
        if not self._takes_whole_batches:
            return self._variables()
        fed = {id(v) for metric in compiled_metrics(self._model) for v in metric.variables}
        return [variable for variable in self._variables() if id(variable) not in fed]

    def results(self, world: World = ONE) -> dict[str, float]:
        """Return the metrics over all ranks since `reset`, by Keras' names, without the loss."""
        if self._slow is not None:
            self._slow.flush()
        if self._computes_own:
            own = self._own_results
            own_results = self._model._get_metrics_result_or_logs(own) if own else {}
        else:
            with over_all(self._summed(), world):
                own_results = self._model.get_metrics_result()
        plain: dict[str, float] = {}
        for name, value in own_results.items():
            for key, number in value.items() if isinstance(value, dict) else [(name, value)]:
                if key != "loss":
                    plain[key] = as_number(number)
        # All ranks take the numbers of a single rank, because callbacks decide by these numbers and
        # processors may round differently.
        return dict(world.from_first(plain))

    def reset(self) -> None:
        """Reset all metrics, without `model.reset_metrics`, which is called when Keras calls it."""
        if self._slow is not None:
            self._slow.forget()
        for metric in self._model.metrics:
            metric.reset_state()
        self._own_results = {}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the metrics' variables, in their order."""
        if self._slow is not None:
            self._slow.flush()
        return [{str(n): v.value.detach().clone() for n, v in enumerate(self._variables())}]

    @torch.no_grad()
    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from a state: add up the values of all ranks; use shared values once."""
        summed = {id(variable) for variable in self._summed()}
        for number, variable in enumerate(self._variables()):
            result = [state[str(number)] for state in states if str(number) in state]
            if result:
                each = torch.stack(result) if id(variable) in summed else result[0][None]
                variable.value.copy_(each.sum(0))

    def _variables(self) -> list[Any]:
        return [v for metric in self._model.metrics for v in metric.variables]


def compiled_metrics(model: Any) -> list[Any]:
    compiled = model._compile_metrics
    if compiled is None or not compiled.built:
        return []
    lists = [*compiled._flat_metrics, *compiled._flat_weighted_metrics]
    return [metric for listed in lists if listed is not None for metric in listed.metrics]


def sample_losses(model: Any) -> tuple[Callable[[Any, Any], torch.Tensor], str, bool]:
    """Return the only compiled loss of a built model as a function of each sample.

    Returns:
        a function that returns the losses of shape (samples,) from targets and outputs; the name of
        the loss function; and whether it takes logits.

    Raises:
        ModelError: there are several losses, or the model has its own `compute_loss`.
    """
    losses = getattr(model._compile_loss, "_flat_losses", None) or []
    if len(losses) != 1 or is_overridden(model, "compute_loss"):
        raise ModelError(
            "the loss of a single sample is known of one compiled loss, and this model has "
            f"{'its own compute_loss' if len(losses) == 1 else len(losses) or 'none'}",
            do="compare `trainer.predict(data)` with the targets",
        )
    import keras

    loss = losses[0].loss

    def values(y: Any, y_pred: Any) -> torch.Tensor:
        # The same computation as loss(y, y_pred), without the reduction.
        y, y_pred = (keras.ops.convert_to_tensor(item, dtype=loss.dtype) for item in (y, y_pred))
        given: torch.Tensor = loss.call(y, y_pred)
        return given.reshape(len(y_pred), -1).mean(1)

    name = getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__)
    options = getattr(loss, "_fn_kwargs", {})
    return values, name, bool(options.get("from_logits", False))


def build(model: Any, batch: Batch) -> None:
    """Build the parts of model, loss, metrics and optimizer that need a first batch."""
    y, weight = targets_of(batch)
    if _takes(model, "sparsecategorical") and _are_shares(y):
        raise ModelError(
            f"the model is compiled with {_loss_name(model)}, which takes class numbers, and the "
            f"targets are shares of classes of shape {tuple(y.shape)}, such as mixup makes",
            do='compile it with loss="categorical_crossentropy"; class numbers of a validation are '
            "then taken as shares, too",
        )
    if _takes(model, "categorical") and isinstance(classes := _classes(model), int):
        y = _as_shares(y, classes)
    if _are_shares(y) and (sparse := _sparse_metric(model)):
        raise ModelError(
            f"the model is compiled with the metric {sparse}, which takes class numbers, and the "
            f"targets are shares of classes of shape {tuple(y.shape)}, such as mixup makes, and "
            "loss='categorical_crossentropy' makes of class numbers",
            do=f"compile it with metrics=[{re.sub('_?sparse_?', '', sparse, flags=re.I)!r}], which "
            "takes the class of the largest share",
        )
    y, weight = _weight_of_places(model, y, weight)
    model._symbolic_build(data_batch=(batch.inputs, y, weight))


def _loss_name(model: Any) -> str:
    given = getattr(model._compile_loss, "_user_loss", None)
    name = given if isinstance(given, str) else getattr(given, "name", "")
    return str(name or getattr(given, "__name__", ""))


def _sparse_metric(model: Any) -> str:
    compiled = model._compile_metrics
    given = [] if compiled is None else [compiled._user_metrics, compiled._user_weighted_metrics]
    for metric in tree_flatten(given)[0]:
        name = metric if isinstance(metric, str) else getattr(metric, "__name__", "")
        name = str(name or type(metric).__name__)
        if name.lower().startswith("sparse"):
            return name
    return ""


def _takes(model: Any, kind: str) -> bool:
    return _loss_name(model).replace("_", "").lower().startswith(kind)


def _classes(model: Any) -> Any:
    try:
        shape = model.output_shape
    except (AttributeError, ValueError, RuntimeError):
        return None
    return shape[-1] if isinstance(shape, tuple) and shape else None


def _are_shares(y: Any) -> bool:
    return torch.is_tensor(y) and y.is_floating_point() and y.dim() > 1 and y.shape[-1] > 1


def _as_shares(y: Any, classes: int) -> Any:
    if not torch.is_tensor(y) or y.is_floating_point() or classes < 2 or y.dim() not in (1, 2):
        return y
    if y.dim() == 2 and y.shape[1] != 1:
        return y
    return torch.nn.functional.one_hot(y.reshape(-1).long(), classes).float()


def _weighed(batch: Batch, class_weight: Mapping[int, float], numbers: bool) -> Batch:
    y, own = targets_of(batch)
    if not isinstance(y, torch.Tensor):
        raise ModelError(
            "class_weight needs targets that are one array, as in Keras",
            do="give sample_weight, in the structure of the targets",
        )
    classes = classes_of(y, numbers)
    weight = torch.ones(classes.shape, dtype=torch.float32, device=classes.device)
    for number, of_class in class_weight.items():
        weight[classes == int(number)] = of_class
    if own is not None:
        dims = max(own.dim(), weight.dim())
        own, weight = (w.reshape(w.shape + (1,) * (dims - w.dim())) for w in (own, weight))
        weight = own * weight
    if weight.dim() == 1:
        return batch._replace(weight=weight)
    return batch._replace(targets={"targets": y, WEIGHTS: weight})


def classes_of(y: torch.Tensor, numbers: bool) -> torch.Tensor:
    if y.dim() > 1 and y.shape[-1] == 1:
        y = y.squeeze(-1)
    elif y.dim() > 1 and not numbers:
        y = y.argmax(-1)
    return y.round().long() if y.is_floating_point() else y


def _weight_of_places(model: Any, y: Any, weight: Any) -> tuple[Any, Any]:
    """Return targets and weights; each position of a sample with several classes gets a weight."""
    is_one_a_sample = torch.is_tensor(y) and torch.is_tensor(weight) and weight.dim() == 1
    numbers = takes_numbers(model)
    if not is_one_a_sample or not (numbers or _takes(model, "categorical")):
        return y, weight
    has_shares = y.dim() > 1 and (y.shape[-1] == 1 or not numbers)
    shape = y.shape[:-1] if has_shares else y.shape
    return y, weight.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)


def takes_numbers(model: Any) -> bool:
    """Return whether the compiled loss takes class numbers, not class probabilities."""
    return _takes(model, "sparsecategorical")


def targets_of(batch: Batch) -> tuple[Any, Any]:
    """Return targets and sample weights of a batch; None for missing targets or weights."""
    targets = batch.targets
    if isinstance(targets, dict) and WEIGHTS in targets:
        return targets["targets"], targets[WEIGHTS]
    return targets, batch.weight


def in_full_precision(outputs: Any) -> Any:
    """Return outputs that autocast made half precision as float32, for computing losses.

    Half precision that the user has chosen by a Keras policy stays.
    """
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return outputs
    return _with_masks(lambda t: t.float() if t.dtype in _HALF else t, outputs)


def _of_samples(loss: torch.Tensor, batch: Batch) -> Value:
    return (loss * float(batch.samples), batch.samples) if batch.padding else loss


def _outputs_of_samples(outputs: Any, batch: Batch) -> Any:
    if not batch.padding:
        return outputs

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = rows_of_samples(tensor, batch)
        mask = getattr(tensor, "_keras_mask", None)
        if mask is not None:
            own._keras_mask = rows_of_samples(mask, batch)  # type: ignore[attr-defined]
        return own

    return map_tensors(cut, outputs)


def _with_masks(function: Callable[[torch.Tensor], torch.Tensor], outputs: Any) -> Any:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        result, mask = function(tensor), getattr(tensor, "_keras_mask", None)
        if mask is not None:
            result._keras_mask = mask  # type: ignore[attr-defined]
        return result

    return map_tensors(apply, outputs)


def as_number(value: Any) -> Any:
    """Return a metric's result as a float, or unchanged if it is not a single number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return value
