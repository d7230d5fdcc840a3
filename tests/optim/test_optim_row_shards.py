"""Which rank owns which rows of tables, and the memory of those that lie elsewhere."""

import mmap
import sys

import pytest
import torch
from torch import nn

from flatout.kernels import table_rows
from flatout.optim import RowShards
from flatout.words import size_words
from flatout.world import Place, World

pytestmark = pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")

BLOCK = 64


def shards_of(rank, size, tables):
    found = RowShards(World(Place(rank=rank, world_size=size)))
    for weight in tables:
        found.takes(weight)
    return found


def test_ranks_own_all_rows_once_and_about_as_many_bytes():
    shapes = ((9000, 8), (70_000, 1), (30_001, 3), (9000, 16), (900, 9))
    tables = [nn.Embedding(rows, width).weight for rows, width in shapes]
    held = []
    for rank in range(3):
        shards = shards_of(rank, 3, tables)
        assert [weight in shards for weight in tables] == [True] * 4 + [False]
        held.append(0)
        first = shards.by_owner(tables[0], torch.arange(9000))
        first = first[0].split(first[1])[rank]
        for weight in tables[:4]:
            places, counts = shards.by_owner(weight, torch.arange(len(weight)))
            assert torch.equal(places.sort().values, torch.arange(len(weight)))
            own = places[sum(counts[:rank]) :][: counts[rank]]
            assert torch.equal(shards.places(weight, own), torch.arange(len(own)))
            # Tables that may be read by the same ids.
            assert len(weight) != 9000 or torch.equal(own, first)
            held[-1] += len(own) * weight.shape[1] * 4
    assert sum(held) == sum(weight.numel() * 4 for weight in tables[:4])
    assert max(held) - min(held) <= BLOCK * (8 + 16) * 4
    assert f"{size_words(min(held))} to {size_words(max(held))}" in shards.words()


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_whole_tables_is_given_back(rank):
    weight = nn.Parameter(torch.rand(90_000, 8))
    before = weight.detach().clone()
    shards = shards_of(rank, 2, [weight])
    part = shards.part(weight, weight.detach())
    places, counts = shards.by_owner(weight, torch.arange(len(weight)))
    assert torch.equal(part, before[places.split(counts)[rank]])
    assert shards.part(weight, weight.detach()) is part
    if sys.platform == "linux":
        kept = int(weight.count_nonzero()) * 4
        assert kept <= 2 * mmap.PAGESIZE
