"""Marks the ends of epochs of Keras, and sets its backend's threads; imported behind `set_up`."""

from __future__ import annotations

import keras
from stamps import Stamps


class Clock(keras.callbacks.Callback):
    def __init__(self, stamps: Stamps) -> None:
        super().__init__()
        self.stamps = stamps

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.stamps.mark()


def set_threads(threads: int) -> None:
    """JAX has read the environment."""
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(threads)
    if keras.backend.backend() == "tensorflow":
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        tensorflow.config.threading.set_inter_op_parallelism_threads(threads)
