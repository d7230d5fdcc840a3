"""The job of bench/convnet.py: a small ConvNet on 28x28 images held in memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

SIDE = 28
CLASSES = 10
BATCH = 512
LEARNING_RATE = 1e-3


class Images(NamedTuple):
    """Images (n, 28, 28) float32 in [0, 1], and labels (n,) int64."""

    images: np.ndarray
    labels: np.ndarray


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="written by `save`")
    parser.add_argument("--epochs", type=int, default=3, help="timed, after one of warm-up")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def save(path: Path, train: Images, held_out: Images) -> None:
    np.savez(path, *train, *held_out)


def load(path: Path) -> tuple[Images, Images]:
    """The training and the held-out images."""
    with np.load(path) as arrays:
        train_images, train_labels, held_images, held_labels = (arrays[n] for n in arrays.files)
    return Images(train_images, train_labels), Images(held_images, held_labels)
