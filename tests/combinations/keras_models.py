"""Keras models, their callbacks and their data, as both `keras.Model.fit` and Flatout take them."""

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
    """Overrides what Keras' trainer calls, but for `train_step`, and does something else."""

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
    """The model of a case, built but not compiled."""
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
    """Remembers the rates of the epochs and what happens at their ends."""

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
    """Remembers each event with its logs."""


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
    """Batches that are counted when they are asked for."""

    def __init__(self, batches: list[Any], name: str = "getitem") -> None:
        super().__init__()
        self.batches, self.name = batches, name

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        count(self.name)
        return self.batches[number]


def plain_epochs(case: Any) -> Iterator[Any]:
    """The batches of all epochs, in the order of the plain loop."""
    for epoch in range(EPOCHS):
        yield from plain_epoch(case, epoch)


def plain_epoch(case: Any, epoch: int) -> list[Any]:
    """An epoch's batches; accumulated ones as one that is so many times as large."""
    made, k = list(plain_batches(case, epoch)), case.accumulate
    groups = [zip(*made[start : start + k], strict=True) for start in range(0, len(made), k)]
    whole = [tuple(map(np.concatenate, group)) for group in groups]
    if case.weights == "class":  # which a generator cannot have in Keras
        weight = np.vectorize(CLASS_WEIGHT.get, otypes=["float32"])
        return [(x, y, weight(y)) for x, y, _ in whole]
    return [one if case.weights == "sample" else one[:2] for one in whole]


def as_keras(case: Any, data: dict[str, Any]) -> dict[str, Any]:
    """The data of a fit as Keras takes them: a torch Dataset and a function are none."""
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
    """The same for `keras.Model.fit`."""
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
