"""The job of bench/trainer.py: a tiny MLP on in-memory data, where only overhead is left to win."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

FEATURES, HIDDEN, CLASSES = 32, 64, 10
BATCH = 64
LEARNING_RATE = 1e-3
THREADS = 1


def arguments(*flags: str) -> argparse.Namespace:
    """What every peer is told, and the flags that this one has besides."""
    parser = argparse.ArgumentParser()
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=20, help="timed, after one of warm-up")
    parser.add_argument("--samples", type=int, default=8192)
    return parser.parse_args()


def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (samples, 32) float32, and int64 labels that a linear map of them decides."""
    random = np.random.default_rng(0)
    inputs = random.standard_normal((samples, FEATURES), dtype=np.float32)
    labels = (inputs @ random.standard_normal((FEATURES, CLASSES), dtype=np.float32)).argmax(1)
    return inputs, labels.astype(np.int64)
