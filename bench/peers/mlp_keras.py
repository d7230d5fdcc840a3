"""Keras on torch: arrays given to `fit`, no metrics, no progress bar; otherwise its defaults."""

from __future__ import annotations

import os

import mlp_job

ARGUMENTS = mlp_job.arguments()
os.environ["KERAS_BACKEND"] = "torch"
os.environ["KERAS_HOME"] = str(ARGUMENTS.out.parent)  # no settings but its own

import keras  # noqa: E402
import torch  # noqa: E402
from keras_clock import Clock  # noqa: E402
from stamps import Stamps, report  # noqa: E402


def main() -> None:
    torch.set_num_threads(mlp_job.THREADS)
    keras.utils.set_random_seed(0)
    inputs, labels = mlp_job.data(ARGUMENTS.samples)
    model = keras.Sequential(
        [
            keras.Input((mlp_job.FEATURES,)),
            keras.layers.Dense(mlp_job.HIDDEN, activation="relu"),
            keras.layers.Dense(mlp_job.CLASSES),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(mlp_job.LEARNING_RATE),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    stamps = Stamps()
    model.fit(
        inputs,
        labels,
        batch_size=mlp_job.BATCH,
        epochs=1 + ARGUMENTS.epochs,
        shuffle=True,
        verbose=0,
        callbacks=[Clock(stamps)],
    )

    predictions = model.predict(inputs, batch_size=len(inputs), verbose=0).argmax(1)
    steps = -(-len(inputs) // mlp_job.BATCH)
    accuracy = float((predictions == labels).mean())
    report(ARGUMENTS.out, stamps, steps=steps, accuracy=accuracy)


if __name__ == "__main__":
    main()
