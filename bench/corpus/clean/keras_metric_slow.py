"""Which pixels belong to a disc? Keras on torch."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np


def discs(count, seed):
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:24, 0:24]
    center = rng.uniform(6, 18, (count, 2, 1, 1))
    inside = (x - center[:, 0]) ** 2 + (y - center[:, 1]) ** 2 < 25
    images = inside + rng.normal(0, 0.5, (count, 24, 24))
    return images[..., None].astype("float32"), inside.astype("int64")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="of an epoch")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    x, y = discs(16 * args.steps, 0)
    held_x, held_y = discs(64, 1)
    model = keras.Sequential(
        [
            keras.Input((24, 24, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(24 * 24 * 2),
            keras.layers.Reshape((24, 24, 2)),
        ]
    )
    overlap = keras.metrics.MeanIoU(2, sparse_y_pred=False)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, batch_size=16, epochs=args.epochs, verbose=2)
    overlap.update_state(held_y, model.predict(held_x, verbose=0))
    print(f"held out: mean overlap {float(overlap.result()):.3f}")
    model.save("discs.keras")


if __name__ == "__main__":
    main()
