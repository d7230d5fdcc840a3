"""The jobs of bench/keras.py: the ConvNet of bench/convnet.py as a Keras model, by its own fit."""

from __future__ import annotations

import os

import convnet_job


def set_up(arguments: object, backend: str) -> None:
    """What Keras and its backend read when they are imported."""
    os.environ["KERAS_BACKEND"] = backend
    os.environ["KERAS_HOME"] = str(arguments.out.parent)  # no settings but its own
    os.environ["NPROC"] = str(arguments.threads)


def make_model():
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
    model.compile(
        optimizer=keras.optimizers.Adam(convnet_job.LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model
