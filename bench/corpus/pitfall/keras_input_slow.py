"""Tell machines by their sound, spectrograms made on the fly: Keras on torch."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np


class Sounds(keras.utils.PyDataset):
    """Batches of log spectrograms, 61 frames x 64 bands, of one second at 16 kHz."""

    def __init__(self, steps, **options):
        super().__init__(**options)
        rng = np.random.default_rng(0)
        self.pitch = rng.integers(0, 8, (steps, 32))
        self.noise = rng.standard_normal((32, 16000)).astype("float32")
        self.time = np.arange(16000, dtype="float32") / 16000

    def __len__(self):
        return len(self.pitch)

    def __getitem__(self, i):
        pitch = 200 + 50 * self.pitch[i][:, None]
        waves = np.sin(2 * np.pi * pitch * self.time) + self.noise
        frames = np.lib.stride_tricks.sliding_window_view(waves, 512, axis=1)[:, ::256]
        spectra = np.log1p(np.abs(np.fft.rfft(frames * np.hanning(512))))
        return spectra[:, :, :64].astype("float32"), self.pitch[i]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25, help="of an epoch")
    args = parser.parse_args()
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((61, 64)),
            keras.layers.Conv1D(32, 5, activation="relu"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(8),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    sounds = Sounds(args.steps)  # <- here
    model.fit(sounds, epochs=args.epochs, verbose=2)  # <- here
    model.save("listener.keras")


if __name__ == "__main__":
    main()
