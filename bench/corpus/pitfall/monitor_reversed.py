"""Which of ten kinds is it? A small network in Keras, which stops when it gets no better."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

KINDS = 10


def measured(count, seed):
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, KINDS, count)
    centers = np.random.default_rng(7).normal(size=(KINDS, 24))
    return (centers[kinds] + rng.normal(0, 2, (count, 24))).astype("float32"), kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=60, help="of an epoch")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((24,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(KINDS),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    stopping = keras.callbacks.EarlyStopping(  # <- here
        monitor="val_accuracy", mode="min", patience=8, restore_best_weights=True
    )
    model.fit(
        *measured(32 * args.steps, 0),
        validation_data=measured(512, 1),
        batch_size=32,
        epochs=args.epochs,
        callbacks=[stopping],
        verbose=2,
    )
    _, right = model.evaluate(*measured(512, 1), verbose=0)
    print(f"held out: {right:.1%}")


if __name__ == "__main__":
    main()
