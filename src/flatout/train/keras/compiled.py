"""The objective of a compiled `keras.Model`, with Keras' arguments and Keras' results."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flatout.data import Arrays, Batch, Pipeline, Source, are_arrays, split_validation
from flatout.errors import DataError, ModelError
from flatout.models import (
    KerasJob,
    SlowMetrics,
    adapter_of,
    as_keras_source,
    call,
    compiled_facts,
    keras_callback_facts,
    on_rank,
    own_method,
    reads_batches,
)
from flatout.models.keras import compiled
from flatout.optim import KerasOptimizer
from flatout.train.callbacks import Callback
from flatout.train.callbacks.callback import check_events
from flatout.train.evaluate import evaluate
from flatout.train.history import History
from flatout.train.job import Job
from flatout.train.job_facts import Facts, fact
from flatout.train.keras.callbacks import KerasCallbacks, watched
from flatout.train.keras.own_steps import data_of, evaluate_as_written
from flatout.train.loop import Loop
from flatout.train.losses.class_counts import (
    balanced_weights,
    balanced_words,
    count,
    counts_of,
    is_balanced,
)
from flatout.train.losses.confusion import ConfusionCount
from flatout.train.losses.sample_loss import SampleLoss, of_compiled
from flatout.train.objective import FitData, FitOptions, Objective
from flatout.train.predict import predict
from flatout.train.ranks import agreed
from flatout.train.signature import Signature
from flatout.train.split_checks import split_words
from flatout.train.state import FitState
from flatout.train.warm_start import warm_start
from flatout.world import place

# The number of fits of each model in this process.
_fits_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# Maximum number of elements in a tuple of data: inputs, targets and weights.
_MOST_PARTS = 3


class KerasHistory(History):
    """A History whose `history` has the names of Keras, and not the seconds of an epoch.

    Attributes:
        params: `epochs`, `steps` and `verbose` of the fit.
        model: the fitted Keras model.
    """

    params: Mapping[str, Any] = MappingProxyType({})
    model: Any = None

    @property
    def history(self) -> dict[str, list[Any]]:
        """The logs by name, a value for each epoch that has one."""
        names = dict.fromkeys(name for logs in self.epochs for name in logs if name != "seconds")
        return {name: [logs[name] for logs in self.epochs if name in logs] for name in names}


class CompiledObjective(Objective):
    """A model with the loss, metrics and optimizer of its `compile`."""

    history = KerasHistory
    ends_epochs = True

    def __init__(self, model: Any, devices: int, **given: Any) -> None:
        self.model = model
        self.adapter = adapter_of(model)
        self.adapter.check()
        here = place()
        if devices > 1 and here.world_size == 1:
            raise ModelError(
                "the ranks of a compiled Keras model are started by the command, not in a notebook",
                do=f"flatout run --devices {devices} script.py; or leave model.compile out, "
                "and give loss, optimizer and metrics to the Trainer",
            )
        own = own_method(model, "fit")
        if here.world_size > 1 and own:
            raise ModelError(
                f"{type(model).__name__} has its own {own}, which runs in Keras' own loop, on "
                f"one rank; this is {here}",
                do=f"override compute_loss and compute_metrics in place of {own}: any number of "
                "ranks can run them",
            )
        self._count: ConfusionCount | None = None  # of an evaluation
        self._counts = list(given.get("metrics") or ()) == ["confusion"]
        if self._counts:
            given["metrics"] = ()
        twice = [name for name, value in given.items() if value is not None and value != ()]
        if twice:
            raise ModelError(
                f"{', '.join(twice)} given for a Keras model that is compiled with its own",
                do="set it in model.compile(...), which Flatout follows; "
                'metrics=["confusion"] may be given here',
            )
        self.optimizer: Any = None
        self.scheduler = None
        self.schedule_every, self.monitor = "step", None
        self._warm_start: str | Path | None = None
        self._callbacks: Any = None
        self._slow_metrics: Any = None
        self._class_weight: dict[int, float] | None = None
        self._is_balanced = False

    def start_warm(self, source: str | Path, say: Callable[[str], None]) -> Signature | None:
        """Remember the warm start's source, which `build` loads after the first batch."""
        self._warm_start = source
        return None

    def count_fits(self, loop: Loop, first: int, resumes: bool) -> int:
        """Return the number of earlier fits of this model: each fit draws other sample orders.

        A fit that begins at a later epoch draws the orders of that epoch. A resumed fit draws the
        orders that it would have drawn without the interruption.
        """
        loaded = loop.resume_checkpoint if resumes else None
        if loaded is not None:
            return int((loaded.state["extra"] or {}).get("fits_before", 0))
        return 0 if first else _fits_of.get(self.model, 0)

    def cut(
        self, source: Source, steps: int | None, loop: Loop, *, restarts: bool = False
    ) -> Source:
        """Return the source unchanged: `to_fit` and `to_evaluate` have applied the steps."""
        return source

    def comes_in_samples(self, x: Any, y: Any) -> bool:
        """Return whether `fit` makes the batches, because the data come as samples."""
        if own := own_method(self.model, "fit"):
            raise ModelError(
                f"{type(self.model).__name__} has its own {own}, which runs as written: no batch "
                "size can be tried with it",
                do="say a batch size",
            )
        is_ours = not x.in_batches if isinstance(x, Pipeline) else isinstance(x, Arrays)
        return is_ours or (x is not None and are_arrays(x))

    def to_fit(self, data: FitData, loop: Loop, *, drop_last: bool) -> tuple[Source, Source | None]:
        """Return the training source and the validation source, for data as in `model.fit`."""
        x, y, sample_weight = _with_targets(self.model, data.x, data.y, data.sample_weight)
        held_out = data.validation_data
        if data.validation_split and held_out is None:
            (x, y, sample_weight), held_out = split_validation(
                x, y, sample_weight, data.validation_split
            )
            if words := split_words(y, held_out[1]):
                loop.say(words)
        is_weighed_here = isinstance(x, (Arrays, Pipeline)) or _is_dense(self.model, y)
        self._is_balanced = is_balanced(data.class_weight) and is_weighed_here
        # Arrays carry the weights of their samples, because Keras' adapters refuse `class_weight`.
        brings_own = are_arrays(x) and not is_weighed_here
        given = None if self._is_balanced else self._given_weights(data.class_weight, y, loop)
        weights = _class_weights(given, self.model, y)
        seed = loop.asked.seed + self.fits_before
        source = as_keras_source(
            x, y, sample_weight, batch_size=data.batch_size, shuffle=data.shuffle, seed=seed,
            class_weight=weights if brings_own else None, steps=data.steps_per_epoch,
            workers=loop.asked.recipe.input.workers,
        )  # fmt: skip
        if weights is not None and sample_weight is not None:
            raise DataError(
                "class_weight and sample_weight are given at the same time",
                do="multiply them into one sample_weight",
            )
        self._class_weight = None if brings_own else weights
        if held_out is None:
            return source, None
        is_parts = isinstance(held_out, tuple) or (
            isinstance(held_out, list) and len(held_out) <= _MOST_PARTS and are_arrays(held_out)
        )
        parts = held_out if is_parts else (held_out,)
        size = data.validation_batch_size
        if not (isinstance(parts[0], Pipeline) and parts[0].in_batches):
            size = size or data.batch_size
        x, y, weight = (*parts, None, None)[:_MOST_PARTS]
        return source, self.to_evaluate(x, y, loop, size, weight, data.validation_steps)

    def _given_weights(self, given: Any, y: Any, loop: Loop) -> Any:
        if not is_balanced(given):
            return given
        if not hasattr(y, "shape"):
            raise DataError(
                "class_weight='balanced' needs targets in one array, found "
                f"{'none' if y is None else f'a {type(y).__name__}'}",
                do="pass the weights, as class_weight={0: 1.0, 1: 5.0}; or x and y as arrays, or a "
                "pipeline of flatout.data",
            )
        numbers = compiled.takes_numbers(self.model)
        counts = count(compiled.classes_of(torch.as_tensor(y), numbers))
        loop.say(balanced_words(counts, None))
        return balanced_weights(counts)

    def weigh_classes(self, source: Source, loop: Loop, names: tuple[str, ...] | None) -> None:
        """Weigh classes by their numbers of samples, if the fit was asked for balanced weights."""
        if self._is_balanced:
            classes_of = partial(compiled.classes_of, numbers=compiled.takes_numbers(self.model))
            counts = counts_of(source, classes_of, loop.world)
            self._class_weight = _class_weights(balanced_weights(counts), self.model, None)
            loop.say(balanced_words(counts, names))

    def to_evaluate(
        self,
        x: Any,
        y: Any,
        loop: Loop,
        batch_size: int | None,
        sample_weight: Any = None,
        steps: int | None = None,
    ) -> Source:
        """Return a source that is read once, in order, for data as in `model.evaluate`."""
        x, y, sample_weight = _with_targets(self.model, x, y, sample_weight)
        return as_keras_source(
            x, y, sample_weight, batch_size=batch_size, steps=steps, restarts=True
        )

    def to_predict(
        self, x: Any, loop: Loop, batch_size: int | None, steps: int | None = None
    ) -> Source:
        """Return a source of inputs, in order."""
        return as_keras_source(x, batch_size=batch_size, steps=steps)

    def build(self, source: Source, loop: Loop) -> Signature | None:
        """Build the model, loss, metrics and optimizer on a first batch, and load a warm start."""
        # Each rank may read its own pipe. The pipe keeps the batch that is read here.
        first = agreed(source, loop.world).peek(1)[0]
        compiled.build(self.model, loop.feed.inputs(first))
        optimizer, variables = self.model.optimizer, self.model.trainable_variables
        if self.optimizer is not None and self.optimizer.drives(optimizer, variables):
            return None
        self.optimizer = KerasOptimizer(optimizer, variables)
        if self._warm_start is None:
            return None
        # Load weights and the optimizer's averages; keep rate, step count and schedule.
        with self.optimizer.own_rate():
            words, signature = warm_start(self.model, self.optimizer, self._warm_start)
        loop.say(words)
        self._warm_start = None
        return signature

    def fit_as_written(self, data: FitData, loop: Loop, options: FitOptions) -> History | None:
        """Run a model in Keras' loop if its class overrides fit or a step; else return None."""
        own = own_method(self.model, "fit")
        if data.validation_data is not None or data.validation_split:
            own = own or own_method(self.model, "evaluate")
        if not own:
            return None
        if loop.asked.lr_rule is not None:
            raise ModelError(
                f"{type(self.model).__name__} has its own {own}, which steps the optimizer "
                "itself, so an lr_rule has no effect",
                do="set the learning rate in model.compile(...)",
            )
        self._check_is_keras_data(own, data.x, data.validation_data)
        self._say_as_written(loop, own)
        weights = self._given_weights(data.class_weight, data.y, loop)
        theirs = self.model.fit(
            **data._replace(class_weight=weights)._asdict(),
            epochs=options.epochs,
            verbose=options.verbose,
            callbacks=options.callbacks,
            initial_epoch=options.initial_epoch,
            validation_freq=options.validation_freq,
        )
        history = KerasHistory(batch_size=data.batch_size or 32)
        history.epochs = [
            {name: values[n] for name, values in theirs.history.items() if n < len(values)}
            for n in range(len(theirs.epoch))
        ]
        history.first_epoch = theirs.epoch[0] if theirs.epoch else 0
        history.params, history.model = theirs.params, theirs.model
        return history

    def _say_as_written(self, loop: Loop, own: str) -> None:
        loop.say(
            f"{type(self.model).__name__} has its own {own}: it runs as written, in Keras' own "
            "loop, and nothing of it is changed"
        )

    def evaluate_as_written(self, **arguments: Any) -> dict[str, float] | None:
        """Run `evaluate` if the model's class overrides it; else return None."""
        own = own_method(self.model, "evaluate")
        if not own:
            return None
        self._check_is_keras_data(own, arguments.get("x"))
        return dict(self.model.evaluate(**_given(arguments), return_dict=True))

    def predict_as_written(self, **arguments: Any) -> Any:
        """Run `predict` if the model's class overrides it; else return None."""
        own = own_method(self.model, "predict")
        if not own:
            return None
        self._check_is_keras_data(own, arguments.get("x"))
        return self.model.predict(**_given(arguments))

    def _check_is_keras_data(self, own: str, *data: Any) -> None:
        for one in data:
            if isinstance(one, (Arrays, Pipeline)):
                raise DataError(
                    f"{type(self.model).__name__} has its own {own}, so Keras' own loop reads the "
                    f"data, and Keras cannot read {type(one).__name__} of flatout.data",
                    do="pass arrays, a keras.utils.PyDataset or a DataLoader; or override "
                    "compute_loss and compute_metrics in place of train_step: then Flatout reads "
                    "the data",
                )

    def job(self, loop: Loop, source: Source | None, *, training: bool) -> Job:
        """Return the compiled loss and metrics, to train or to evaluate."""
        if training:
            metrics = compiled.compiled_metrics(self.model)
            self._slow_metrics = SlowMetrics(
                metrics,
                lambda line: loop.say(line),
                share=loop.terms.slow_share,
                kept_bytes=loop.terms.slow_bytes,
            )
        self._count = ConfusionCount() if self._counts and not training else None
        return KerasJob(
            self.model,
            training=training,
            also=None if self._count is None else self._count.count,
            slow_metrics=self._slow_metrics,
            # All ranks run the same code in an evaluation; in training, only within steps.
            together=lambda: loop.together if training else loop.world,
            class_weight=self._class_weight if training else None,
        )

    def facts(self) -> Facts:
        """Return the facts of the model's `compile`, for a resume to compare."""
        callbacks = [] if self._callbacks is None else self._callbacks.callbacks
        weights = {"class_weight": fact(str(self._class_weight))} if self._class_weight else {}
        return {**compiled_facts(self.model), **keras_callback_facts(callbacks), **weights}

    def split_callbacks(self, callbacks: Any) -> tuple[list[Callback], list[Any]]:
        """Return Flatout's callbacks, and Keras' callbacks."""
        import keras

        is_list = isinstance(callbacks, keras.callbacks.CallbackList)
        given = (callbacks.callbacks if is_list else callbacks) or []
        if not isinstance(given, (list, tuple)):
            given = [given]
        ours = [callback for callback in given if isinstance(callback, Callback)]
        for callback in ours:
            check_events(callback)
        theirs = [callback for callback in given if not isinstance(callback, Callback)]
        for callback in theirs:
            if not isinstance(callback, keras.callbacks.Callback):
                raise ModelError(
                    f"a callback is a keras.callbacks.Callback or a flatout.Callback, found "
                    f"{type(callback).__name__}"
                )
        return ours, theirs

    def begin(
        self, state: FitState, job: Job, callbacks: list[Any], first: int, verbose: int | str
    ) -> list[Callback]:
        """Start Keras' callbacks at epoch `first`; return callbacks that call them."""
        import keras

        loop, history = state.trainer.loop, state.history
        _fits_of[self.model] = self.fits_before + 1
        self._callbacks = keras.callbacks.CallbackList(
            on_rank(callbacks, loop.world),
            add_history=True,
            add_progbar=False,
            model=self.model,
            verbose=verbose,
            epochs=state.epochs,
            steps=state.steps_per_epoch,
        )
        if isinstance(history, KerasHistory):
            history.params, history.model = self._callbacks.params, self.model
        return [
            KerasCallbacks(
                self._callbacks,
                self.model,
                first,
                lambda: {"loss": state.read_loss(), **job.results(loop.world)},
                world=loop.world,
                reads_batches=any(map(reads_batches, callbacks)),
            )
        ]

    def end(self) -> None:
        """Stop timing the metrics."""
        self._callbacks = None
        self._slow_metrics.close()
        self._slow_metrics = None

    def evaluate(
        self, loop: Loop, source: Source, stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return loss and metrics over `source`; None if `stopped` returned True."""
        callbacks = self._callbacks or self._callback_list((), loop, source.steps)
        callbacks.on_test_begin()
        self.model.reset_metrics()  # within a fit, the epoch's metrics have been read by now
        watch = partial(watched, callbacks, "test", loop.world)
        if self.tests_as_written:
            result = evaluate_as_written(self.model, loop, source, stopped, watch)
        else:
            result = self._counted(evaluate(self, loop, source, stopped, watch), loop)
        callbacks.on_test_end(result)
        return result

    def predict(self, loop: Loop, source: Source) -> Any:
        """Return the outputs of all batches, in order, and call Keras' callbacks."""
        callbacks = self._callbacks or self._callback_list((), loop, source.steps)
        self.model.make_predict_function()
        callbacks.on_predict_begin()

        def watch(batches: Iterator[Batch], read: Callable[[], Any]) -> Iterator[Batch]:
            return watched(callbacks, "predict", loop.world, batches, lambda: {"outputs": read()})

        outputs = predict(self, loop, source, watch)
        callbacks.on_predict_end()
        return outputs

    @contextmanager
    def followed(
        self, callbacks: Any, loop: Loop, steps: int | None, verbose: int | str
    ) -> Iterator[None]:
        """Let `callbacks` follow an evaluation or prediction, in place of a fit's callbacks."""
        before = self._callbacks
        self._callbacks = self._callback_list(callbacks, loop, steps, verbose)
        try:
            yield
        finally:
            self._callbacks = before

    def _callback_list(
        self, callbacks: Any, loop: Loop, steps: int | None, verbose: int | str = 0
    ) -> Any:
        import keras

        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        ours, theirs = self.split_callbacks(callbacks)
        if ours:
            raise ModelError(
                f"{type(ours[0]).__name__} follows fit, not evaluate or predict",
                do="pass it to fit; evaluate and predict take a keras.callbacks.Callback",
            )
        return keras.callbacks.CallbackList(
            on_rank(theirs, loop.world),
            add_progbar=verbose in (1, 2) and loop.world.is_first,
            model=self.model,
            verbose=verbose,
            epochs=1,
            steps=steps,
        )

    @property
    def tests_as_written(self) -> bool:  # type: ignore[override]
        """Return whether an evaluation calls a step that the model's class overrides."""
        return bool(own_method(self.model, "test"))

    @property
    def predicts_as_written(self) -> bool:  # type: ignore[override]
        """Return whether a prediction calls a step that the model's class overrides."""
        return bool(own_method(self.model, "predict_step"))

    def _counted(self, found: dict[str, float] | None, loop: Loop) -> dict[str, float] | None:
        if found is None or self._count is None:
            return found
        recall = self._count.compute(loop.world.gather(self._count.state_dict()))
        self.confusion = self._count.latest
        return {**found, "mean_recall": recall}

    def sample_loss(self) -> SampleLoss:
        """Return an object that computes the loss of each sample alone."""
        return of_compiled(self.model)

    def output(self, inputs: Any, loop: Loop) -> Any:
        """Return the model's outputs for a batch's inputs, in evaluation mode."""
        return call(self.model, inputs, training=False)

    def predicted(self, batch: Batch, loop: Loop) -> Any:
        """Return the outputs of a batch, from an overridden predict step if there is one."""
        if self.predicts_as_written:
            return self.model.predict_function([data_of(batch)])
        return self.output(batch.inputs, loop)

    def in_order(self, figures: dict[str, float]) -> Any:
        """Return the figures without names, as Keras does: a list, or the only figure."""
        return self.model._flatten_metrics_in_order(figures)

    def as_given(self, outputs: Any) -> Any:
        """Return predictions as numpy arrays."""
        return _as_numpy(outputs)


def _with_targets(model: Any, x: Any, y: Any, weight: Any) -> tuple[Any, Any, Any]:
    is_tuple = y is None and isinstance(x, tuple) and 1 < len(x) <= _MOST_PARTS and are_arrays(x)
    if not is_tuple or not _has_one_input(model):
        return x, y, weight
    return x[0], x[1], x[2] if len(x) == _MOST_PARTS else weight


def _is_dense(model: Any, y: Any) -> bool:
    """Return whether targets have a class for each position in a sample, as for words of a text.

    Keras does not apply class weights to such targets.
    """
    dims = len(getattr(y, "shape", ()))
    last = y.shape[-1] if dims > 1 else 1
    return dims > (2 if last == 1 or not compiled.takes_numbers(model) else 1)


def _has_one_input(model: Any) -> bool:
    import keras

    if isinstance(model, keras.Sequential):
        return True
    inputs = getattr(model, "inputs", None)
    # A subclass does not show its inputs. If it is compiled with a loss, its data have targets.
    return len(inputs) == 1 if inputs else getattr(model, "loss", None) is not None


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not defaults: an overridden method may lack some."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return {k: v for k, v in given.items() if not (isinstance(v, str) and v == "auto")}


def _class_weights(given: Any, model: Any, y: Any) -> dict[int, float] | None:
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    if not isinstance(given, Mapping) or not all(map(_is_class, given)):
        result = f"{given!r}" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        raise ModelError(
            f"class_weight maps class numbers to weights, found {result}",
            do="write class_weight={0: 1.0, 1: 5.0}; of a list: dict(enumerate(weights))",
        )
    several = isinstance(y, dict) or (isinstance(y, (list, tuple)) and len(y) > 1)
    if several or len(getattr(model, "outputs", None) or [0]) > 1:
        raise ModelError(
            "class_weight needs a model of a single output, as in Keras",
            do="give sample_weight, in the structure of the targets",
        )
    return {int(number): float(weight) for number, weight in given.items()}


def _is_class(number: Any) -> bool:
    return isinstance(number, numbers.Real) and float(number).is_integer()


def _as_numpy(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_numpy(part) for key, part in value.items()}
    return [_as_numpy(part) for part in value]
