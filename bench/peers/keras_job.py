"""The jobs of bench/keras.py: the ConvNet of bench/convnet.py as a compiled Keras model."""

from __future__ import annotations

import argparse
import os
from typing import Any

import convnet_job

OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop")


def set_up(arguments: argparse.Namespace, backend: str) -> None:
    """What Keras and its backend read when they are imported."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ["KERAS_HOME"] = str(arguments.out.parent)  # no settings but its own
    os.environ["NPROC"] = str(arguments.threads)  # the size of XLA's thread pool on the CPU


def make_model(optimizer: str = "adam") -> Any:
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((convnet_job.SIDE, convnet_job.SIDE, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(convnet_job.CLASSES),
        ]
    )
    kinds = {
        "sgd": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(convnet_job.LEARNING_RATE),
        "adamw": lambda: keras.optimizers.AdamW(convnet_job.LEARNING_RATE),
        "rmsprop": lambda: keras.optimizers.RMSprop(convnet_job.LEARNING_RATE),
    }
    model.compile(
        optimizer=kinds[optimizer](),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model
