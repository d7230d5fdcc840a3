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


def all_dealt(shards, weight):
    """All rows of a table in the order of their owners, where each lies, and how many are whose."""
    dealt = shards.dealt(weight, table_rows.group(torch.arange(len(weight)), len(weight)))
    return dealt.groups.rows, dealt.local, dealt.counts


def test_ranks_own_all_rows_once_and_about_as_many_bytes():
    shapes = ((9000, 8), (70_000, 1), (30_001, 3), (9000, 16), (900, 9))
    tables = [nn.Embedding(rows, width).weight for rows, width in shapes]
    held = []
    for rank in range(3):
        shards = shards_of(rank, 3, tables)
        assert [weight in shards for weight in tables] == [True] * 4 + [False]
        held.append(0)
        rows, _, counts = all_dealt(shards, tables[0])
        first = rows.split(counts)[rank]
        for weight in tables[:4]:
            rows, local, counts = all_dealt(shards, weight)
            assert torch.equal(rows.sort().values, torch.arange(len(weight)))
            own = rows.split(counts)[rank]
            assert torch.equal(local.split(counts)[rank], torch.arange(len(own)))
            assert torch.equal(shards.in_whole(weight, torch.arange(len(own))), own)
            assert shards.owned(weight) == len(own)
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
    rows, _, counts = all_dealt(shards, weight)
    assert torch.equal(part, before[rows.split(counts)[rank]])
    assert shards.part(weight, weight.detach()) is part
    if sys.platform == "linux":
        kept = int(weight.count_nonzero()) * 4
        assert kept <= 2 * mmap.PAGESIZE
