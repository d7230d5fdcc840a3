"""Sort pictures of 28x28 with wide dense layers: Keras on torch."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 256 * args.steps)
    x = (rng.normal(size=(10, 784))[y] + 2 * rng.normal(size=(len(y), 784))).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(2048, activation="relu"),
            keras.layers.Dense(2048, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.02),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, batch_size=256, epochs=args.epochs, verbose=2)
    model.save("wide.keras")


if __name__ == "__main__":
    main()
