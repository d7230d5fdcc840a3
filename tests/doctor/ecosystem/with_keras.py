"""Trains a small network with Keras on torch; --wrong for mistakes, which are marked."""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

WRONG = "--wrong" in sys.argv


class Signals(keras.utils.PyDataset):
    def __init__(self, rows, seed):
        super().__init__()
        generator = np.random.default_rng(seed)
        self.rows = generator.normal(size=(rows, 32)).astype("float32")
        self.classes = (self.rows[:, 0] + self.rows[:, 1] > 0).astype("int64")

    def __len__(self):
        return len(self.rows) // 32

    def __getitem__(self, at):
        some = slice(32 * at, 32 * at + 32)
        rows = self.rows[some]
        for _ in range(30 if WRONG else 0):
            rows = np.sort(np.fft.irfft(np.fft.rfft(rows)).astype("float32"))  # wrong: starvation
        return rows, self.classes[some]


def main():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(2, activation="softmax" if WRONG else None),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(Signals(2048, 0), validation_data=Signals(256, 1), epochs=200, verbose=0)


if __name__ == "__main__":
    main()
