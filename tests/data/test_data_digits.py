from __future__ import annotations

import torch

from flatout.data.source import as_source
from flatout.data.sources.arrays.public import digits


def test_real_handwriting_enlarged():
    train, test = digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.inputs.shape == (1437, 1, 28, 28)
    assert train.inputs.dtype == torch.uint8
    assert (train.inputs.min(), train.inputs.max()) == (0, 255)
    assert train.labels_range() == test.labels_range() == (0, 9)
    batch = next(as_source(train, batch_size=64).batches(0))
    assert batch.inputs.dtype == torch.float32
    assert 0 <= batch.inputs.min() < batch.inputs.max() <= 1


def test_every_digit_in_proportion_and_in_one_part_only():
    train, test = digits(seed=4)
    shares = [part.targets.bincount() / len(part) for part in (train, test)]
    assert (shares[0] - shares[1]).abs().max() < 0.005
    train_rows = {row.numpy().tobytes() for row in train.inputs}
    shared = sum(row.numpy().tobytes() in train_rows for row in test.inputs)
    assert shared == 0


def test_size_and_seed():
    assert digits(size=16)[0].inputs.shape == (1437, 1, 16, 16)
    assert digits(seed=1)[0].digest == digits(seed=1)[0].digest != digits(seed=2)[0].digest
