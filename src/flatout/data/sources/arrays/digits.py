"""Handwritten digits that need no download, bundled with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import interpolate

from flatout.data.sources.arrays.arrays import Arrays

# Largest amount of ink in each of the 8x8 cells of load_digits, which counts from 0.
_MOST_INK = 16


def digits(size: int = 28, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Return (train, test): 1,797 handwritten digits from UCI's "Optical Recognition" data set.

    Images are enlarged from 8x8 by bilinear interpolation. The split is 80 to 20, with every digit
    in proportion.

    Args:
        size: height and width of the enlarged images, in pixels.
        seed: seed of the split.

    Returns:
        Two `Arrays` of 1,437 and 360 samples: images uint8 of shape (samples, 1, size, size), which
        become float32 from 0 to 1 batch by batch, and labels int64 of shape (samples,).
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    ink, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(ink.reshape(-1, 1, 8, 8)).float()
    large = interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
    images = (large * (255 / _MOST_INK)).round().to(torch.uint8)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=seed, stratify=labels
    )
    targets = torch.from_numpy(labels.astype(np.int64))
    first, second = (
        Arrays(images[rows], targets[rows], scale=1 / 255)
        for rows in map(torch.from_numpy, (train, test))
    )
    return first, second
