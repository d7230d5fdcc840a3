"""Which part of a dataset a rank or a worker takes."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from flatout.observe.loaders import SeenLoader
from flatout.observe.shards import block_of, part_of, parts_of_indices

X = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))


class Stream(IterableDataset):
    def __init__(self, x, change=lambda row: row):
        self.x, self.change, self.name = x, change, "x"

    def __iter__(self):
        return map(self.change, self.x)


@pytest.mark.parametrize("each", [1, 2, 3, 12])
def test_a_part_is_known_in_any_order(each):
    at = random.Random(each).sample(range(each - 1, 600, each), 24)
    assert part_of(at) == ((each - 1, each) if each > 1 else (0, 1))
    assert part_of(at[:15]) is None


def test_samples_of_a_subset_are_known_by_their_place_in_the_whole():
    data = TensorDataset(X)
    mine = Subset(Subset(data, range(1, 600, 2)), range(0, 300, 2))
    firsts = [list(range(20)), list(range(30, 62)), [3]]
    assert parts_of_indices(mine, firsts) == [(1, 4), (1, 4), None]
    assert block_of(mine) is None
    assert block_of(Subset(data, range(40, 90))) == (40, 50, 600)
    assert block_of(data) is None


def streamed(dataset, starts, each, size=8):
    """A loader's facts after each of these workers has given some batches."""
    loader = DataLoader(dataset, size, num_workers=len(starts))
    seen = SeenLoader(loader, None, 0)
    for batch in range(5):
        for start in starts:
            first = start + batch * size * each
            seen.took(dataset.change(dataset.x[first : first + size * each : each]), 1)
    seen.compare_with_others()
    return seen.facts


def test_samples_of_a_stream_are_known_by_their_bytes():
    facts = streamed(Stream(X), (0, 1), 3)
    assert (facts.parts, facts.parts_of) == ([(0, 3), (1, 3)], 600)
    changed = streamed(Stream(X, lambda row: row + 1), (0, 1), 3)
    assert (changed.parts, changed.parts_of) == (None, None)
    labels = torch.arange(600).remainder(3).unsqueeze(1)  # rows that are equal by chance
    assert streamed(Stream(labels), (0, 1), 3).parts is None


def test_a_stream_that_no_one_shares_is_not_compared():
    assert streamed(Stream(X), (0,), 2).parts is None
