"""Trainer for Keras models: fit, evaluate and predict with Keras' words and Keras' results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flatout.data.batch import Batch
from flatout.data.source import Source
from flatout.data.sources.array_parts import split_validation
from flatout.data.sources.keras_data import as_keras_source
from flatout.errors import ModelError
from flatout.models import keras_model
from flatout.optim import KerasOptimizer
from flatout.save.keras_file import load_keras
from flatout.train import guard
from flatout.train.callbacks import Callback
from flatout.train.evaluate import evaluate
from flatout.train.fit import Fit
from flatout.train.history import History
from flatout.train.image_files import files_as_images
from flatout.train.job import Job
from flatout.train.job_facts import Facts
from flatout.train.keras_callback_ranks import on_rank, reads_batches
from flatout.train.keras_callbacks import KerasCallbacks, watched
from flatout.train.keras_facts import compiled_facts, keras_callback_facts
from flatout.train.keras_job import KerasJob, call, compiled_metrics, targets_of
from flatout.train.keras_ranks import save_on_first
from flatout.train.keras_slow_metrics import SlowMetrics
from flatout.train.loop import Loop
from flatout.train.notebook import check_ranks_asked
from flatout.train.predict import predict
from flatout.train.signature import Signature
from flatout.train.trainer import Trainer, progress_of
from flatout.train.warm_start import warm_start as start_warm
from flatout.world import place

# Of a compiled model these are its own.
_COMPILED = ("loss", "optimizer", "lr", "metrics", "scheduler", "schedule_every", "clip_norm")
_COMPILED_TOO = ("clip_value", "loss_weights")


class KerasHistory(History):
    """A History whose `history` is as Keras' own: by name, without the seconds of an epoch."""

    @property
    def history(self) -> dict[str, list[Any]]:
        """The logs by name, a value for each epoch that has one."""
        names = dict.fromkeys(name for logs in self.epochs for name in logs if name != "seconds")
        return {name: [logs[name] for logs in self.epochs if name in logs] for name in names}


class KerasTrainer(Trainer):
    """What `Trainer(model)` is for a compiled `keras.Model`.

    Loss, metrics and optimizer are those of `compile`; recipe, allow, seed, run and the other
    arguments are as for torch models.

    Raises:
        ModelError: Keras is on another backend than torch, or a layer calls another framework; on
            several ranks, the model has its own `train_step`.
    """

    model: Any
    optimizer: Any

    def __init__(self, model: Any, **arguments: Any) -> None:
        keras_model.check_trainable(model)
        self.devices = arguments.pop("devices", 1)
        check_ranks_asked(self.devices)
        here = place()
        if self.devices > 1 and here.world_size == 1:
            raise ModelError(
                "the ranks of a compiled Keras model are started by the command, not in a notebook",
                do=f"flatout run --devices {self.devices} script.py; or leave model.compile out, "
                "and give loss, optimizer and metrics to the Trainer",
            )
        if here.world_size > 1 and keras_model.has_own_step(model):
            raise ModelError(
                f"{type(model).__name__} has its own train_step, which runs in Keras' own loop, on "
                f"one rank; this is {here}",
                do="override compute_loss and compute_metrics in place of train_step, which any "
                "number of ranks can run",
            )
        own = [name for name in (*_COMPILED, *_COMPILED_TOO) if name in arguments]
        if own:
            raise ModelError(
                f"{', '.join(own)} given beside a Keras model that is compiled with its own",
                do="set it in model.compile(...), which Flatout follows",
            )
        self._warm_start = arguments.pop("warm_start", None)
        self._callbacks: Any = None
        self._slow_metrics: Any = None
        self._validation_freq: Any = 1
        self.optimizer = None
        self.model = model
        self.history = None
        self._fit = None
        self.seed = arguments.get("seed", 0)
        self.scheduler = None
        self.schedule_every = "step"
        self._loop_arguments = arguments
        self.loop = Loop(**self._loop_arguments)

    # -- fit -----------------------------------------------------------------------------------

    def fit(  # type: ignore[override]
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Iterable[int] = 1,
        *,
        resume: bool | str = False,
    ) -> History:
        """As `model.fit`, with the same arguments.

        Args:
            x: numpy arrays or tensors (a tuple, list or dict of them for several inputs), a
                PyDataset, generator, DataLoader or tf.data.Dataset, or a source of `flatout.data`.
            y: targets, in the structure of the outputs.
            batch_size: samples per batch for arrays; 32 by default.
            epochs: the epoch number to reach.
            verbose: 0 shows no progress.
            callbacks: Keras' and Flatout's own, in any order.
            validation_split: the share at the end of the arrays that is held out.
            validation_data: (x, y) or (x, y, sample_weight), or what `x` may be.
            shuffle: a new order each epoch, a function of seed and epoch alone.
            class_weight: weight of each class number.
            sample_weight: a weight for each sample, or in the structure of the targets.
            initial_epoch: the number of the first epoch.
            steps_per_epoch: batches that make an epoch, where the data do not say.
            validation_steps: the same for validation.
            validation_batch_size: samples per batch in validation; `batch_size` by default.
            validation_freq: every so many epochs, or the epochs after which to validate.
            resume: True goes on from the newest checkpoint of `run`.

        Returns:
            History: `history.history` is as Keras' own.
        """
        if keras_model.has_own_step(self.model):
            return self._fit_as_written(
                x, y, batch_size=batch_size, epochs=epochs, verbose=verbose, callbacks=callbacks,
                validation_split=validation_split, validation_data=validation_data,
                shuffle=shuffle, class_weight=class_weight, sample_weight=sample_weight,
                initial_epoch=initial_epoch, steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps, validation_batch_size=validation_batch_size,
                validation_freq=validation_freq,
            )  # fmt: skip
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_validation(
                x, y, sample_weight, validation_split
            )
        source = as_keras_source(
            x, y, sample_weight, batch_size=batch_size, shuffle=shuffle, seed=self.seed,
            class_weight=class_weight, steps=steps_per_epoch,
            workers=self.loop.requested.input.workers,
        )  # fmt: skip
        validation = None
        if validation_data is not None:
            parts = validation_data if isinstance(validation_data, tuple) else (validation_data,)
            validation = as_keras_source(
                *parts, batch_size=validation_batch_size or batch_size, steps=validation_steps
            )
        self.loop = Loop(**self._loop_arguments, resume=resume)
        source, validation = self.learn(source, validation)
        self._build(source)
        self._validation_freq = validation_freq
        ours, theirs = _apart(callbacks)
        progress = progress_of(verbose)
        self._fit = Fit(self, source, validation, epochs, ours, progress)
        self._fit.callbacks.insert(0, self._keras_callbacks(theirs, initial_epoch, self._fit))
        history = self._fit.state.history
        history.__class__ = KerasHistory
        self.history = history
        try:
            return self._fit.run()
        finally:
            self._callbacks = None
            self._slow_metrics.close()
            self._slow_metrics = None

    def _fit_as_written(self, x: Any, y: Any, **arguments: Any) -> History:
        """A `train_step` of the user's own runs as it is, in Keras' loop."""
        if self.loop.lr_rule is not None:
            raise ModelError(
                f"{type(self.model).__name__} has its own train_step, which steps the optimizer "
                "itself, so no lr_rule can be followed",
                do="set the learning rate in model.compile(...)",
            )
        self.loop.say(
            f"{type(self.model).__name__} has its own train_step: it runs as written, in Keras' "
            "own loop, and nothing of it is changed"
        )
        theirs = self.model.fit(x, y, **arguments)
        history = KerasHistory(batch_size=arguments["batch_size"] or 32)
        history.epochs = [
            {name: values[n] for name, values in theirs.history.items() if n < len(values)}
            for n in range(len(theirs.epoch))
        ]
        self.history = history
        return history

    def _keras_callbacks(self, given: list[Any], initial_epoch: int, fit: Fit) -> KerasCallbacks:
        import keras

        state = fit.state
        self._callbacks = keras.callbacks.CallbackList(
            on_rank(given, self.world()),
            add_history=True,
            add_progbar=False,
            model=self.model,
            verbose=0,
            epochs=state.epochs,
            steps=state.steps_per_epoch,
        )

        def read() -> dict[str, Any]:
            return {"loss": self.loop.mean_loss(), **fit.job.results(self.world())}

        return KerasCallbacks(
            self._callbacks,
            self.model,
            initial_epoch,
            read,
            world=self.world(),
            reads_batches=any(map(reads_batches, given)),
        )

    def _build(self, source: Source) -> None:
        """Build what of model, loss, metrics and optimizer waits for a first batch."""
        self.world()  # from here on the first rank speaks for all
        batch = self.loop.inputs(source.peek(1)[0])
        self.model._symbolic_build(data_batch=_as_keras(batch))
        variables = self.model.trainable_variables
        if self.optimizer is None or not self.optimizer.drives(self.model.optimizer, variables):
            self.optimizer = KerasOptimizer(self.model.optimizer, variables)
            if self._warm_start is not None:
                self.loop.say(self._start_warm(self._warm_start))
                self._warm_start = None

    def _start_warm(self, source: str | Path) -> str:
        """Weights and the optimizer's averages from there; rate, step and schedule as compiled."""
        keras = self.model.optimizer
        rate = float(keras._get_current_learning_rate())
        words, signature = start_warm(self.model, self.optimizer, source)
        self.signature = signature or self.signature
        if hasattr(keras._learning_rate, "assign"):
            keras._learning_rate.assign(rate)
        else:  # a schedule, which counts by the optimizer's steps
            keras._iterations.assign(0)
        return words

    # -- evaluate, predict, files ----------------------------------------------------------------

    def evaluate(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        sample_weight: Any = None,
        steps: int | None = None,
    ) -> dict[str, float]:
        """Loss and metrics over all samples, by Keras' names.

        Raises:
            NumbersError: if a weight is not finite.
        """
        source = as_keras_source(x, y, sample_weight, batch_size=batch_size, steps=steps)
        with self.met(source) as source:
            self._build(source)
            figures = self.evaluation(source)
        assert figures is not None
        return figures

    def predict(self, x: Any, *, batch_size: int | None = None) -> Any:
        """The model's outputs for all samples, in order, as numpy arrays.

        Paths of image files are taken as those of torch models are.
        """
        x = files_as_images(x, self.signature)
        with self.met(as_keras_source(x, batch_size=batch_size)) as source:
            if not self.model.built:
                self._build(source)
            return _as_numpy(predict(self, source))

    def save(self, path: str | Path) -> Path:
        """Write the model: `.keras` as a whole, `.weights.h5` or `.safetensors` its weights.

        Raises:
            NumbersError: if a weight is not finite.
            CheckpointError: if it cannot be written; an older file is then still whole.
        """
        guard.check_state(self.model, "saving")
        return save_on_first(self.model, path, self.world(), self.metadata())

    def load(self, path: str | Path) -> None:
        """Load weights from a `.keras`, `.weights.h5` or `.safetensors` file, in place.

        Raises:
            CheckpointError: if the file is damaged, or of another model.
        """
        signature = Signature.of(load_keras(self.model, path), str(path))
        self.signature = signature or self.signature

    # -- what fit, evaluate and predict ask for --------------------------------------------------

    def job(self, source: Source | None, *, training: bool) -> Job:
        """The compiled loss and metrics, to train or to evaluate."""
        if training:
            self._slow_metrics = SlowMetrics(
                compiled_metrics(self.model), lambda line: self.loop.say(line)
            )
        return KerasJob(
            self.model,
            training=training,
            slow_metrics=self._slow_metrics,
            # Evaluation is the same code on all ranks; of training, the steps are.
            together=(lambda: self.loop.together) if training else self.world,
        )

    def facts(self) -> Facts:
        """What the model was compiled with, for a resume to compare."""
        callbacks = [] if self._callbacks is None else self._callbacks.callbacks
        return {**compiled_facts(self.model), **keras_callback_facts(callbacks)}

    def evaluation(
        self, source: Source, stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Loss and metrics over `source`; None where `stopped` said so."""
        callbacks = self._callbacks
        if callbacks is None:
            self.model.reset_metrics()
            return evaluate(self, source, stopped)
        callbacks.on_test_begin()
        self.model.reset_metrics()  # in a fit those of the epoch have been read by now
        found = evaluate(self, source, stopped, partial(watched, callbacks))
        callbacks.on_test_end(found)
        return found

    def takes_bytes(self, batch: Batch) -> bool:
        """Whether a layer of the model scales its images."""
        return keras_model.scales_images(self.model)

    def takes_channels_last(self) -> bool:
        """Whether the model takes images as (size, height, width, channels)."""
        return keras_model.takes_channels_last(self.model)

    def validates(self, epoch: int) -> bool:
        """Whether `validation_freq` says so."""
        return bool(self.model._should_eval(epoch, self._validation_freq))

    def output(self, inputs: Any) -> Any:
        """What the model gives for a batch's inputs, in evaluation."""
        return call(self.model, inputs, training=False)


def _apart(callbacks: Any) -> tuple[list[Callback], list[Any]]:
    """Flatout's callbacks, and Keras'."""
    import keras

    given = (
        callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    )
    if given is None:
        given = []
    if not isinstance(given, (list, tuple)):
        given = [given]
    ours = [callback for callback in given if isinstance(callback, Callback)]
    theirs = [callback for callback in given if not isinstance(callback, Callback)]
    for callback in theirs:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ModelError(
                f"a callback is a keras.callbacks.Callback or a flatout.Callback, found "
                f"{type(callback).__name__}"
            )
    return ours, theirs


def _as_keras(batch: Batch) -> tuple[Any, Any, Any]:
    return (batch.inputs, *targets_of(batch))


def _as_numpy(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _as_numpy(part) for key, part in value.items()}
    return [_as_numpy(part) for part in value]
