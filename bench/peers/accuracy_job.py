"""The job of `same_accuracy`: the ConvNet of bench/convnet.py, trained until it has settled.

In mid-descent even two roundings of one sum end some tenths of a percent apart, whichever is
better. So the learning rate comes to rest (1cycle: Smith and Topin 2017, "Super-convergence"), the
batches are small, and both sides start from the same weights and see the samples in the same order.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from torch.optim.lr_scheduler import OneCycleLR

BATCH = 64
PEAK_LEARNING_RATE = 3e-3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True, help="written by convnet_job.save")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()


def schedule(samples: int, epochs: int) -> partial[OneCycleLR]:
    """What makes the schedule of a run from its optimizer."""
    steps = -(-samples // BATCH) * epochs
    return partial(OneCycleLR, max_lr=PEAK_LEARNING_RATE, total_steps=steps)
