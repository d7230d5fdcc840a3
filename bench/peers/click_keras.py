"""The same model in Keras, on TensorFlow or torch, by `fit` with Keras' own Adam."""

from __future__ import annotations

import argparse
import os
from typing import Any

import click_job

PARSER = click_job.parser()
PARSER.add_argument("--backend", choices=["torch", "tensorflow"], required=True)
ARGUMENTS: argparse.Namespace = PARSER.parse_args()
os.environ["KERAS_BACKEND"] = ARGUMENTS.backend
os.environ["KERAS_HOME"] = str(ARGUMENTS.out.parent)  # no settings but its own

import keras  # noqa: E402
from keras import layers, ops  # noqa: E402
from keras_clock import Clock, set_threads  # noqa: E402
from stamps import Stamps, report  # noqa: E402


def make_model() -> Any:
    ids = keras.Input((click_job.FIELDS,), dtype="int32")
    begin = keras.initializers.RandomUniform(-0.01, 0.01)
    first = layers.Embedding(ARGUMENTS.rows, 1, embeddings_initializer=begin)(ids)
    factors = layers.Embedding(ARGUMENTS.rows, ARGUMENTS.factors, embeddings_initializer=begin)(ids)
    pairs = ops.square(ops.sum(factors, 1)) - ops.sum(ops.square(factors), 1)
    deep = layers.Flatten()(factors)
    for width in click_job.LAYERS:
        deep = layers.Dense(width, activation="relu")(deep)
    deep = ops.squeeze(layers.Dense(1)(deep), 1)
    logits = ops.sum(first, (1, 2)) + ops.sum(pairs, 1) / 2 + deep
    model = keras.Model(ids, logits)
    model.compile(
        optimizer=keras.optimizers.Adam(click_job.LEARNING_RATE),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def main() -> None:
    set_threads(ARGUMENTS.threads)
    keras.utils.set_random_seed(0)
    train, held_out = click_job.of(ARGUMENTS)
    model = make_model()
    stamps = Stamps()
    model.fit(
        train.ids.astype("int32"),
        train.clicks,
        batch_size=ARGUMENTS.batch,
        epochs=ARGUMENTS.warm_up + ARGUMENTS.epochs,
        shuffle=True,
        verbose=0,
        callbacks=[Clock(stamps)],
    )
    stamps.readings = stamps.readings[-1 - ARGUMENTS.epochs :]
    auc = float("nan")
    if len(held_out.ids):
        logits = model.predict(held_out.ids.astype("int32"), batch_size=4096, verbose=0)
        auc = click_job.auc(logits.reshape(-1), held_out.clicks)
    report(ARGUMENTS.out, stamps, steps=ARGUMENTS.steps, accuracy=auc)


if __name__ == "__main__":
    main()
