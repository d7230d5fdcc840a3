"""Keras models with callbacks and data, in the forms for `keras.Model.fit` and for Flatout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from keras import layers

from combinations.calls import count
from combinations.inputs import CLASS_WEIGHT, EPOCHS, batch_size, plain_batches, samples
from combinations.models import CLASSES, WIDTH

LR, MOMENTUM, DELTA = 0.05, 0.9, 50.0
KINDS = ("train", "test", "predict")
EVENTS = [
    *(f"on_{kind}_{when}" for kind in KINDS for when in ("begin", "end")),
    *(f"on_{kind}_batch_{when}" for kind in KINDS for when in ("begin", "end")),
    "on_epoch_begin",
    "on_epoch_end",
]


@keras.saving.register_keras_serializable("combinations")
class Subclass(keras.Model):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.scale = layers.Rescaling(1 / 8)
        self.body = layers.Dense(16, "tanh", name="body")
        self.head = layers.Dense(CLASSES, name="head")

    def call(self, inputs: Any) -> Any:
        return self.head(self.body(self.scale(inputs)))


@keras.saving.register_keras_serializable("combinations")
class OwnMethods(Subclass):
    """A model that overrides all methods of Keras' trainer but `train_step`."""

    def test_step(self, data: Any) -> Any:
        count("test_step")
        logs = super().test_step(data)
        return logs | {"loss": logs["loss"] + 1, "own": 2 * logs["loss"]}

    def predict_step(self, data: Any) -> Any:
        count("predict_step")
        return super().predict_step(data) * 2

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        count("compute_loss")
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return loss + 0.01 * keras.ops.mean(y_pred**2)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        count("compute_metrics")
        return super().compute_metrics(x, y, y_pred, sample_weight)


@keras.saving.register_keras_serializable("combinations")
class OwnTrainStep(Subclass):
    def train_step(self, data: Any) -> Any:
        count("train_step")
        return super().train_step(data)


SUBCLASSES = {"keras_subclass": Subclass, "keras_own": OwnMethods, "keras_train": OwnTrainStep}


def keras_model(case: Any) -> keras.Model:
    """Return the model of a case, built but not compiled."""
    keras.utils.set_random_seed(0)
    if case.model in SUBCLASSES:
        model = SUBCLASSES[case.model]()
        model(torch.ones(2, WIDTH))
    else:
        norm = [layers.BatchNormalization(name="norm")] if case.model == "keras" else []
        scale, body = layers.Rescaling(1 / 8), layers.Dense(16, "tanh", name="body")
        head = layers.Dense(CLASSES, name="head")
        model = keras.Sequential([layers.Input((WIDTH,)), scale, body, *norm, head])
    if case.frozen == "body":
        model.get_layer("body").trainable = False
    return model


def compiled(case: Any) -> keras.Model:
    model = keras_model(case)
    model.compile(
        keras.optimizers.SGD(LR, momentum=MOMENTUM),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"] if case.weights != "none" else None,
    )
    return model


class Watch(keras.callbacks.Callback):
    """Record the learning rates of epochs and the events at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.events: list[Any] = []

    def on_train_begin(self, logs=None):
        self.events.append(("on_train_begin", None, dict(logs or {})))

    def on_epoch_begin(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch, logs=None):
        self.events.append(("on_epoch_end", epoch, dict(logs or {})))


class Recorder(Watch):
    """Record each event with its logs."""


def _recorded(name: str) -> Any:
    def method(self, number, logs):
        if name == "on_epoch_begin":
            Watch.on_epoch_begin(self, number)
        logs = {key: float(value) for key, value in (logs or {}).items()}
        self.events.append((name, number, logs))

    def numbered(self, number, logs=None):
        method(self, number, logs)

    def plain(self, logs=None):
        method(self, None, logs)

    return numbered if "batch" in name or "epoch" in name else plain


for _name in EVENTS:
    setattr(Recorder, _name, _recorded(_name))


def watch(case: Any) -> Watch:
    return Recorder() if case.callbacks == "own" else Watch()


def callbacks(case: Any, folder: Path, rank: int) -> list[Any]:
    figure = "loss" if case.validation == "none" else "val_loss"
    options = {"monitor": figure, "min_delta": DELTA}
    if case.callbacks == "plateau":
        return [keras.callbacks.ReduceLROnPlateau(factor=0.3, patience=2, **options)]
    if case.callbacks == "early":
        return [keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True, **options)]
    if case.callbacks == "checkpoint":
        path = folder / f"best{rank}.weights.h5"
        only = {"monitor": figure, "save_best_only": True, "save_weights_only": True}
        return [keras.callbacks.ModelCheckpoint(path, **only)]
    return []


class Batches(keras.utils.PyDataset):
    """Batches that count their reads."""

    def __init__(self, batches: list[Any], name: str = "getitem") -> None:
        super().__init__()
        self.batches, self.name = batches, name

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        count(self.name)
        return self.batches[number]


def plain_epochs(case: Any) -> Iterator[Any]:
    """Yield the batches of all epochs, in the order of the plain loop."""
    for epoch in range(EPOCHS):
        yield from plain_epoch(case, epoch)


def plain_epoch(case: Any, epoch: int) -> list[Any]:
    """Return the batches of an epoch; batches of one accumulated step are joined into one."""
    made, k = list(plain_batches(case, epoch)), case.accumulate
    groups = [zip(*made[start : start + k], strict=True) for start in range(0, len(made), k)]
    whole = [tuple(map(np.concatenate, group)) for group in groups]
    if case.weights == "class":  # Keras refuses class_weight with a generator
        weight = np.vectorize(CLASS_WEIGHT.get, otypes=["float32"])
        return [(x, y, weight(y)) for x, y, _ in whole]
    return [one if case.weights == "sample" else one[:2] for one in whole]


def as_keras(case: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a fit in forms that Keras accepts; a torch Dataset is not one of them."""
    x, y, w = samples(case)
    size = batch_size(case)
    rows = (x, y, w) if case.weights == "sample" else (x, y)
    each = [tuple(one[i : i + size] for one in rows) for i in range(0, len(x), size)]
    if case.data in ("dataset", "dataset_log"):
        return {k: v for k, v in data.items() if k != "batch_size"} | {
            "x": Batches(each),
            "shuffle": False,
        }
    if case.data == "generator":

        def forever() -> Iterator[Any]:
            while True:
                yield from each

        return data | {"x": forever(), "steps_per_epoch": len(each)}
    if case.data in ("arrays", "tuple"):
        return data | {"shuffle": False}
    return data


def reference_data(case: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the plain loop as arguments of `keras.Model.fit`."""
    from combinations.inputs import held_out

    held = held_out() if case.weights == "sample" else held_out()[:2]
    fives = [tuple(one[i : i + 5] for one in held) for i in range(0, len(held[0]), 5)]
    steps = len(plain_epoch(case, 0))
    given = {"x": plain_epochs(case), "steps_per_epoch": steps, "epochs": EPOCHS}
    if case.validation in ("arrays", "steps"):
        given["validation_data"] = held if case.validation == "arrays" else held[:2]
        given["validation_batch_size"] = 5 if case.validation == "steps" else batch_size(case)
    if case.validation == "steps":
        given["validation_steps"] = 2
    if case.validation in ("loader", "pipeline"):
        given["validation_data"] = Batches(fives, "held_out")
    return given
