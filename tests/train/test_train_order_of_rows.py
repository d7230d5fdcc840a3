"""Orders of rows that make a result useless are reported: shuffled predictions, sorted labels."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler
from train_jobs import network, trainer

import flatout

X, Y = torch.rand(60, 12, generator=torch.Generator().manual_seed(0)), torch.arange(60) // 20
TABLE = TensorDataset(X, Y)


class Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.by


def predicted(given):
    said = []
    result = flatout.Trainer(Plus(), loss="mse", say=said.append).predict(given)
    return torch.equal(result, X), [line for line in said if line.startswith("predict returns")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: DataLoader(TABLE, 8, shuffle=True), "the DataLoader's RandomSampler"),
        (
            lambda: DataLoader(TABLE, 8, sampler=WeightedRandomSampler([1.0] * 60, 60)),
            "the DataLoader's WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(TABLE, 8, sampler=DistributedSampler(TABLE, 1, 0)),
            "the DataLoader's DistributedSampler",
        ),
        (lambda: flatout.data.arrays(X, Y).shuffle(seed=1).batch(8), "the pipeline's shuffle"),
    ],
)
def test_predictions_in_an_order_that_is_drawn_are_reported(given, words):
    is_in_order, said = predicted(given())
    assert not is_in_order
    assert len(said) == 1
    assert words in said[0]


@pytest.mark.parametrize(
    "given",
    [
        lambda: DataLoader(TABLE, 8),
        lambda: DataLoader(TABLE, 8, sampler=DistributedSampler(TABLE, 1, 0, shuffle=False)),
        lambda: flatout.data.arrays(X, Y).batch(8),
        lambda: X,
    ],
)
def test_predictions_in_the_order_of_the_data_are_not(given):
    assert predicted(given()) == (True, [])


def split(targets, *, as_arrays=False, **options):
    said = []
    given = (flatout.data.arrays(X, targets),) if as_arrays else (X, targets)
    job = trainer(network(), say=said.append, **options)
    job.fit(*given, validation_split=0.25, epochs=1, verbose=0, batch_size=16)
    return [line for line in said if line.startswith("validation_split holds")]


@pytest.mark.parametrize("as_arrays", [False, True])
def test_a_part_of_sorted_labels_that_is_held_out_is_reported(as_arrays):
    (line,) = split(Y, as_arrays=as_arrays)
    assert "holds out the last 15 samples, which have only 1 of 3 labels" in line
    assert "sorted by label" in line
    (line,) = split(torch.arange(60) // 15 % 3 + 2 * (torch.arange(60) >= 45), as_arrays=as_arrays)
    assert "labels that no sample of training has: 2" in line or "sorted" in line


def test_held_out_numpy_arrays_and_untrained_labels_are_reported():
    targets = np.where(np.arange(60) < 45, np.arange(60) % 2, 2)
    (line,) = split(targets)
    assert "labels that no sample of training has: 2:" in line


def test_mixed_labels_and_numbers_are_not_reported():
    assert split(torch.arange(60) % 3) == []
    plain = {"loss": lambda o, t: ((o.sum(1) - t) ** 2).mean()}
    assert split(torch.linspace(0, 1, 60), **plain) == []
    assert split(torch.arange(60), **plain) == []  # a different number for each sample is no label


def test_what_the_line_advises_works():
    train, held_out = flatout.data.arrays(X, Y).split(0.75, seed=1, stratify=True)
    said = []
    job = trainer(network(), say=said.append)
    job.fit(train, validation_data=held_out, epochs=1, verbose=0)
    assert not any(line.startswith("validation_split holds") for line in said)
