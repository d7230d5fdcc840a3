"""Trainer for Keras models that are not compiled: the Trainer's own loss, optimizer and metrics."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flatout.data.batch import Batch
from flatout.data.source import Source
from flatout.errors import ModelError
from flatout.models import keras_model
from flatout.models.keras_rewrites import training_step
from flatout.save.keras_file import load_keras
from flatout.train import guard
from flatout.train.job import Job, TorchJob
from flatout.train.keras_job import call
from flatout.train.keras_ranks import save_on_first
from flatout.train.signature import Signature
from flatout.train.trainer import Trainer, counts_all


class UncompiledKerasTrainer(Trainer):
    """What `Trainer(model, loss=..., optimizer=...)` is for a `keras.Model` without `compile`.

    Everything is as for a torch module; the layers are told whether they train, as Keras tells
    them.

    Raises:
        ModelError: Keras is on another backend than torch, a layer calls another framework, or the
            model has no weights yet.
    """

    model: Any

    def __init__(self, model: Any, **arguments: Any) -> None:
        keras_model.check_trainable(model)
        if not model.built:
            raise ModelError(
                "the Keras model is not built, so it has no weights to train yet",
                do="give it an Input layer, call it once on a batch, or compile it: then the first "
                "batch builds it",
            )
        super().__init__(model, **arguments)

    def job(self, source: Source | None, *, training: bool) -> Job:
        """Forward, loss and fresh metrics, to train or to evaluate."""
        return TorchJob(
            _Called(self.model, training=training),  # type: ignore[arg-type]
            self.loss,
            self.metrics,
            unweighted=training and counts_all(self.loss, source),
            class_weight=self._class_weight if training else None,
            say=self._say_once,
            source=source,
        )

    def output(self, inputs: Any) -> Any:
        """What the model gives for a batch's inputs, in evaluation."""
        return call(self.model, inputs, training=False)

    def save(self, path: str | Path) -> Path:
        """As of a compiled model: `.keras`, `.weights.h5` or `.safetensors`."""
        guard.check_state(self.model, "saving")
        return save_on_first(self.model, path, self.world(), self.metadata())

    def load(self, path: str | Path) -> None:
        """Load weights from such a file, in place."""
        signature = Signature.of(load_keras(self.model, path), str(path))
        self.signature = signature or self.signature

    def takes_bytes(self, batch: Batch) -> bool:
        """Whether a layer of the model scales its images."""
        return keras_model.scales_images(self.model)

    def takes_channels_last(self) -> bool:
        """Whether the model takes images as (size, height, width, channels)."""
        return keras_model.takes_channels_last(self.model)


class _Called:
    """The model as a function of a batch's inputs."""

    def __init__(self, model: Any, *, training: bool) -> None:
        self._model = model
        self._training = training

    def parameters(self) -> Any:
        """Those of the model, whose dtypes tell what it takes."""
        return self._model.parameters()

    def __call__(self, *parts: Any, **named: Any) -> Any:
        inputs = named or (parts[0] if len(parts) == 1 else parts)
        with training_step() if self._training else nullcontext():
            return call(self._model, inputs, training=self._training)
