"""The objective of a Trainer: a model with its loss, metrics, optimizer and schedule.

The model is a torch module, or a Keras model that is not compiled; compiled.py handles compiled
Keras models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from flatout.data import (
    Arrays,
    Batch,
    Pipeline,
    Source,
    Stretches,
    are_arrays,
    as_source,
    differs_by_rank,
    with_parts,
)
from flatout.errors import DataError, ModelError
from flatout.models import adapter_of
from flatout.optim import Ftrl, Lamb, Lars, LazyAdam, RowwiseAdagrad
from flatout.train.callbacks import Callback
from flatout.train.callbacks.callback import check_events
from flatout.train.compute import call
from flatout.train.evaluate import evaluate, evaluating
from flatout.train.history import History
from flatout.train.job import Job, TorchJob, metrics_of
from flatout.train.job_facts import Facts, fact, losses_facts, metrics_fact
from flatout.train.loop import Loop
from flatout.train.losses.class_counts import (
    balanced_weights,
    balanced_words,
    counted_classes,
    counts_of,
    is_balanced,
)
from flatout.train.losses.class_weight import ClassWeight
from flatout.train.losses.confusion import Matrix
from flatout.train.losses.losses import Loss, as_loss
from flatout.train.losses.metrics import Given
from flatout.train.losses.narrow import Narrow
from flatout.train.losses.sample_loss import SampleLoss, of_loss
from flatout.train.predict import predict
from flatout.train.several_losses import SeveralLosses, check_names
from flatout.train.signature import Signature
from flatout.train.snapshot import untouched
from flatout.train.split_checks import split_words
from flatout.train.state import FitState
from flatout.train.warm_start import warm_start

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lars": Lars,
    "lamb": Lamb,
    "lazy_adam": LazyAdam,
    "rowwise_adagrad": RowwiseAdagrad,
    "ftrl": Ftrl,
}


# Evaluation keeps no activations, so larger batches than in training are safe and faster.
_EVALUATION_BATCH = 256


class FitData(NamedTuple):
    """The data of a fit, as `Trainer.fit` was given them."""

    x: Any
    y: Any
    batch_size: int | None
    validation_split: float
    validation_data: Any
    shuffle: bool
    class_weight: Any
    sample_weight: Any
    steps_per_epoch: int | None
    validation_steps: int | None
    validation_batch_size: int | None


class FitOptions(NamedTuple):
    """The arguments of `Trainer.fit` other than its data.

    Attributes:
        largest_batch: whether the batch size is the largest that fits in memory.
    """

    largest_batch: bool
    epochs: int
    verbose: int | str
    callbacks: Any
    initial_epoch: int
    validation_freq: int | Collection[int]
    drop_last: bool
    max_steps: int | None
    progress: bool | None


class Objective:
    """A model with the loss, metrics, optimizer and schedule that a Trainer was given.

    Attributes:
        model: the user's own object.
        adapter: access to the model through its framework.
        optimizer: the optimizer that steps the model's parameters.
        scheduler: the scheduler of the optimizer's learning rate, or None.
        schedule_every: "step" or "epoch": the point at which the scheduler steps.
        monitor: the name of the figure that ReduceLROnPlateau follows; None for the loss.
        history: the class of History that a fit fills in.
        fits_before: number of earlier fits of this model: this fit draws other sample orders.
        confusion: counts of the latest evaluation's samples by true and predicted class; None
            without a "confusion" metric.
    """

    history: type[History] = History
    fits_before = 0
    confusion: Matrix | None = None
    # Whether an evaluation or a prediction calls a step that the model's class overrides.
    tests_as_written = predicts_as_written = False
    # Whether the history includes the epoch in which training stops, as in Keras.
    ends_epochs = False

    def __init__(
        self,
        model: Any,
        *,
        loss: Any,
        loss_weights: Mapping[str, float] | None,
        optimizer: Any,
        lr: float | None,
        metrics: Iterable[Given] | Mapping[str, Any],
        scheduler: Any,
        schedule_every: str | None,
        monitor: str | None = None,
    ) -> None:
        if schedule_every not in (None, "step", "epoch"):
            raise ModelError(f"schedule_every is 'step' or 'epoch', found {schedule_every!r}")
        self.model = model
        self.adapter = adapter_of(model)
        self.adapter.check()
        self.loss = _as_losses("cross_entropy" if loss is None else loss, loss_weights)
        self.metrics = metrics
        # An unknown name is an error here, not after the first epoch.
        metrics_of(self.loss, metrics)
        self.optimizer = _as_optimizer(optimizer or torch.optim.Adam, model, lr)
        self.scheduler = _as_scheduler(scheduler, self.optimizer)
        if monitor is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            raise ModelError(
                f"monitor={monitor!r} is for a ReduceLROnPlateau scheduler, and none is given",
                do="leave monitor out, or give scheduler=ReduceLROnPlateau(optimizer, ...)",
            )
        self.schedule_every, self.monitor = schedule_every or "step", monitor
        self._class_weight: Any = None
        self._is_balanced = False
        self._said: set[str] = set()

    def start_warm(self, source: str | Path, say: Callable[[str], None]) -> Signature | None:
        """Load weights and optimizer state; return the signature that comes with them."""
        words, signature = warm_start(self.model, self.optimizer, source)
        say(words)
        return signature

    # -- data ------------------------------------------------------------------------------------

    def count_fits(self, loop: Loop, first: int, resumes: bool) -> int:
        """Return the number of earlier fits, if each fit draws other sample orders; else 0."""
        return 0

    def comes_in_samples(self, x: Any, y: Any) -> bool:
        """Return whether `fit` makes the batches, because the data come as samples."""
        return _comes_in_samples(x) or (y is not None and are_arrays(x))

    def to_fit(self, data: FitData, loop: Loop, *, drop_last: bool) -> tuple[Source, Source | None]:
        """Return the training source and the validation source."""
        held_out = data.validation_data
        share = 0.0 if held_out is not None else data.validation_split
        x, y, last = with_parts(data.x, data.y, data.sample_weight, share)
        held_out = held_out if last is None else last
        if last is not None:
            own, others = (part[1] if isinstance(part, tuple) else part for part in (x, last))
            if words := split_words(own, others):
                loop.say(words)
        self._is_balanced = is_balanced(data.class_weight)
        given = None if self._is_balanced else data.class_weight
        self._class_weight = _class_weights(given, self.loss)
        source = _source(
            x, y, loop, batch_size=data.batch_size, shuffle=data.shuffle, drop_last=drop_last
        )
        if held_out is None:
            return source, None
        return source, self.to_evaluate(held_out, None, loop, data.validation_batch_size)

    def to_evaluate(
        self,
        x: Any,
        y: Any,
        loop: Loop,
        batch_size: int | None,
        sample_weight: Any = None,
        steps: int | None = None,
    ) -> Source:
        """Return a source that is read once, in order."""
        x, y, _ = with_parts(x, y, sample_weight, 0.0)
        if batch_size is None and _comes_in_samples(x):
            batch_size = _EVALUATION_BATCH
        return _source(x, y, loop, batch_size=batch_size, shuffle=False, clip_batch=True)

    def to_predict(
        self, x: Any, loop: Loop, batch_size: int | None, steps: int | None = None
    ) -> Source:
        """Return a source of inputs, in order; a tuple of arrays is one input, not (x, y)."""
        x = (x,) if isinstance(x, tuple) else x
        return self.to_evaluate(x, None, loop, batch_size, steps=steps)

    def cut(
        self, source: Source, steps: int | None, loop: Loop, *, restarts: bool = False
    ) -> Source:
        """Return the source in epochs of `steps` batches; unchanged if `steps` is None."""
        if steps is None:
            return source
        is_own = differs_by_rank(source)
        if is_own and loop.world.size > 1:
            raise DataError(
                "a number of steps counts batches that all ranks read together, and here each rank "
                "reads its own rows",
                do="leave shard out, or leave the steps out: an epoch then has all batches",
            )
        return Stretches(source, steps, restarts=restarts)

    def weigh_classes(self, source: Source, loop: Loop, names: tuple[str, ...] | None) -> None:
        """Weigh classes by their numbers of samples, if the fit was asked for balanced weights."""
        if not self._is_balanced:
            return
        if isinstance(self.loss, SeveralLosses):
            raise ModelError(
                "class_weight='balanced' is for a model of one loss, and there are several",
                do=f"give weights by output: class_weight={{{next(iter(self.loss.parts))!r}: "
                "{0: 1.0, 1: 5.0}}",
            )
        loss = self.loss
        counts = counts_of(source, lambda targets: counted_classes(targets, loss), loop.world)
        self._class_weight = ClassWeight(balanced_weights(counts), loss)
        loop.say(balanced_words(counts, names))

    def build(self, source: Source, loop: Loop) -> Signature | None:
        """Build parts that need a first batch; return a warm start's signature, if any."""

    def takes_bytes(self, batch: Batch) -> bool:
        """Return whether the model takes bytes as they are, because it scales them itself."""
        scales = self.adapter.scales_images()
        return _takes(self.model, batch.rows(0, 2)) if scales is None else scales

    # -- training ----------------------------------------------------------------------------------

    def fit_as_written(self, data: FitData, loop: Loop, options: FitOptions) -> History | None:
        """Run the model's own fit if its class overrides fit or a step; else return None."""

    def job(self, loop: Loop, source: Source | None, *, training: bool) -> Job:
        """Return forward, loss and fresh metrics, to train or to evaluate."""
        return TorchJob(
            self.adapter.called(training=training),
            self.loss,
            self.metrics,
            # A pipeline may have to read all of its targets for this.
            unweighted=(training or not isinstance(source, Pipeline))
            and _counts_all(self.loss, source),
            class_weight=self._class_weight if training else None,
            say=partial(self._say_once, loop),
            source=source,
        )

    def _say_once(self, loop: Loop, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            loop.say(line)

    def facts(self) -> Facts:
        """Return the facts that identify this job, for a resume to compare."""
        return {
            **losses_facts(self.loss),
            "metrics": metrics_fact(metrics_of(self.loss, self.metrics)),
            "class_weight": fact(_class_weight_words(self._class_weight)),
            "schedule_every": fact(self._schedule_words()),
        }

    def _schedule_words(self) -> str:
        if self.scheduler is None:
            return "none"
        return f"{self.schedule_every}{f', by {self.monitor}' if self.monitor else ''}"

    def split_callbacks(self, callbacks: Any) -> tuple[list[Callback], list[Any]]:
        """Return Flatout's callbacks, and those of the model's framework."""
        ours = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        for callback in ours:
            check_events(callback)
        return ours, []

    def begin(
        self, state: FitState, job: Job, callbacks: list[Any], first: int, verbose: int | str
    ) -> list[Callback]:
        """Start the framework's callbacks at epoch `first`; return callbacks that call them."""
        return []

    @contextmanager
    def followed(
        self, callbacks: Any, loop: Loop, steps: int | None, verbose: int | str
    ) -> Iterator[None]:
        """Let the framework's callbacks follow an evaluation or prediction within this context."""
        if callbacks:
            raise ModelError(
                "evaluate and predict take callbacks for a compiled Keras model only, and this "
                f"model is a {type(self.model).__name__}",
                do="give callbacks to fit; or compute the figures after evaluate returns",
            )
        yield

    def end(self) -> None:
        """Restore everything but the model that a fit has changed."""

    def evaluate(
        self, loop: Loop, source: Source, stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return loss and metrics over `source`; None if `stopped` returned True."""
        return evaluate(self, loop, source, stopped)

    def evaluate_as_written(self, **arguments: Any) -> dict[str, float] | None:
        """Run `evaluate` if the model's class overrides it; else return None."""

    def predict(self, loop: Loop, source: Source) -> Any:
        """Return the outputs of all batches of `source`, in order."""
        return predict(self, loop, source)

    def predict_as_written(self, **arguments: Any) -> Any:
        """Run `predict` if the model's class overrides it; else return None."""

    def predicted(self, batch: Batch, loop: Loop) -> Any:
        """Return the outputs of a batch that a prediction keeps."""
        return self.output(batch.inputs, loop)

    def in_order(self, figures: dict[str, float]) -> Any:
        """Return the figures as a list, without their names."""
        return list(figures.values())

    def sample_loss(self) -> SampleLoss:
        """Return an object that computes the loss of each sample alone."""
        if not isinstance(self.loss, Loss):
            raise ModelError(
                "the worst samples are found by one loss, and the model has several",
                do="compare `trainer.predict(data)` with the targets",
            )
        return of_loss(self.loss)

    def output(self, inputs: Any, loop: Loop) -> Any:
        """Return the model's outputs for a batch's inputs, in evaluation mode."""
        narrow = Narrow(self.model, partial(self._say_once, loop))
        return call(self.adapter.called(training=False), narrow.inputs(inputs))

    def as_given(self, outputs: Any) -> Any:
        """Return predictions in the form of the framework's own `predict`."""
        return outputs


def validates(every: int | Collection[int], epoch: int) -> bool:
    """Return whether to validate after this epoch.

    `every` is a number of epochs, or a list of epochs counted from 1.
    """
    return (epoch + 1) % every == 0 if isinstance(every, int) else epoch + 1 in every


def _takes(model: nn.Module, batch: Batch) -> bool:
    parameters = list(model.parameters())
    if any(map(is_lazy, [*parameters, *model.buffers()])):
        return False
    device = parameters[0].device if parameters else torch.device("cpu")
    with untouched(model), evaluating(model):
        try:
            call(model, batch.to(device).inputs)
        except Exception:  # whatever a model raises for inputs that it does not take
            return False
    return True


def _source(x: Any, y: Any, loop: Loop, **options: Any) -> Source:
    asked = loop.asked.recipe.input
    # Without a copy to a device, pinned memory is useless, and allocating it would initialize a
    # device.
    is_pinned = asked.pin_memory != "off" and loop.asked.recipe.world.device != "cpu"
    return as_source(
        x, y, seed=loop.asked.seed, workers=asked.workers, pin_memory=is_pinned, **options
    )


def _counts_all(loss: Loss | SeveralLosses, source: Source | None) -> bool:
    labels = None if source is None else source.labels_range()
    if labels is None or isinstance(loss, SeveralLosses):
        return False
    return loss.ignore_index is None or not labels[0] <= loss.ignore_index <= labels[1]


def _as_losses(loss: Any, weights: Mapping[str, float] | None) -> Loss | SeveralLosses:
    if isinstance(loss, Mapping):
        return SeveralLosses(loss, weights)
    if weights is not None:
        raise ModelError(
            "loss_weights are for several losses, and there is one",
            do='give a loss for each output: loss={"a": "cross_entropy", "b": "mse"}',
        )
    return as_loss(loss)


def _class_weights(given: Any, loss: Loss | SeveralLosses) -> Any:
    if given is None:
        return None
    if not isinstance(loss, SeveralLosses):
        return ClassWeight(given, loss)
    is_by_output = isinstance(given, Mapping) and all(
        isinstance(weights, Mapping) for weights in given.values()
    )
    if not is_by_output:
        raise ModelError(
            "with a loss for each output, class_weight is given by output too",
            do=f"write class_weight={{{next(iter(loss.parts))!r}: {{0: 1.0, 1: 5.0}}}}",
        )
    check_names("class_weight", given, loss.parts)
    return {name: ClassWeight(weights, loss.parts[name]) for name, weights in given.items()}


def _class_weight_words(weights: Any) -> str:
    if isinstance(weights, dict):
        return "; ".join(f"{name}: {value.words}" for name, value in weights.items())
    return "none" if weights is None else weights.words


def _as_optimizer(optimizer: Any, model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        if lr is not None:
            raise ModelError(
                "lr was given together with an optimizer that has its own learning rate",
                do="pass the optimizer's class, or set lr where the optimizer is made",
            )
        return _checked(optimizer, model)
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise ModelError(
                f"unknown optimizer {optimizer!r}; known: {', '.join(_OPTIMIZERS)}",
                do="use one of these names, or pass a torch optimizer or its class",
            )
        optimizer = _OPTIMIZERS[optimizer]
    if not callable(optimizer):
        raise ModelError(
            f"an optimizer is an optimizer, its class or a name, found {type(optimizer).__name__}"
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ModelError("the model has no parameter that can be trained")
    made = optimizer(parameters) if lr is None else optimizer(parameters, lr=lr)
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(f"optimizer(...) gave a {type(made).__name__}, not a torch optimizer")
    return _checked(made, model)


def _checked(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            "LBFGS evaluates the loss several times in one step, which Flatout does not support",
            do="choose another optimizer, or train with a loop of plain PyTorch",
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            "the optimizer has no parameter of this model",
            do="make it from the parameters of the model that is passed here",
        )
    return optimizer


def _comes_in_samples(x: Any) -> bool:
    if isinstance(x, Pipeline):
        return not x.in_batches
    return hasattr(x, "shape") or isinstance(x, (tuple, dict, Dataset, Arrays))


def _as_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
    if scheduler is None:
        return None
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise ModelError(
            f"a scheduler is one of torch's, or takes the optimizer and gives one, found "
            f"{type(scheduler).__name__}"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ModelError(
            "the scheduler belongs to another optimizer than this Trainer's",
            do="pass both objects, or a function that takes the optimizer and gives the scheduler",
        )
    return scheduler
