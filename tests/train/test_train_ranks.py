"""What is refused before several ranks train one model."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from flatout.data.source import as_source
from flatout.errors import DataError, WorldError
from flatout.train.ranks import check_ranks, part_of
from flatout.world import ONE, Place, World


class Two(World):
    """Two ranks, of which the other one has said what it has."""

    def __init__(self, theirs):
        super().__init__(Place(0, 2, 0, 2))
        self.theirs = theirs

    def gather(self, value):
        return [value, self.theirs or value]


class Data:
    digest, batch_size, steps = "0123", 10, 7

    def describe(self):
        return "some data"


def test_one_rank_may_do_as_it_likes():
    check_ranks(nn.BatchNorm1d(3), None, ONE)


def test_layers_of_torch_are_synchronized():
    check_ranks(nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3)), None, Two(None))


def test_other_data_on_another_rank():
    check_ranks(nn.Linear(3, 3), Data(), Two(None))
    with pytest.raises(WorldError, match=r"different data(.|\n)*rank 1: other data, batches of 10"):
        check_ranks(nn.Linear(3, 3), Data(), Two(("4567", 10, 7, "other data")))


def batches():
    for start in range(0, 12, 4):
        yield torch.arange(start, start + 4.0)[:, None], torch.zeros(4)


def test_another_order_on_another_rank():
    """An iterator of the user's own decides the order, which Flatout can only compare."""
    source = as_source(batches)
    (first, *_) = part_of(source, Two(None)).batches(0)
    assert first.inputs.tolist() == [[0.0], [1.0]]
    with pytest.raises(WorldError, match="ranks 0 and 1 have read different batches"):
        next(part_of(source, Two([False, ["0123", "4567"]])).batches(0))


def test_a_distributed_sampler_is_left_out():
    data = TensorDataset(torch.arange(16.0)[:, None], torch.zeros(16))
    shards = DistributedSampler(data, num_replicas=2, rank=0)
    source = as_source(DataLoader(data, 4, sampler=shards))
    with pytest.raises(WorldError, match="ranks 0 and 1 have read different batches") as caught:
        next(part_of(source, Two([False, ["0123", "4567"]])).batches(0))
    assert "leave the DistributedSampler out" in caught.value.do
    # Follow the advice: one order on all ranks.
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    loaders = [DataLoader(data, 4, shuffle=True, generator=g) for g in generators]
    first, second = (part_of(as_source(loader), Two(None)) for loader in loaders)
    firsts, seconds = (torch.cat([b.inputs for b in one.batches(0)]) for one in (first, second))
    assert torch.equal(firsts, seconds)
    assert len(firsts) == 8


def test_what_flatout_orders_is_not_compared():
    source = as_source(torch.ones(8, 1), torch.zeros(8), batch_size=4)
    assert len(list(part_of(source, Two([False, ["0123", "4567"]])).batches(0))) == 2


def test_data_of_other_values_are_told_apart():
    with pytest.raises(WorldError, match="train on different data, of other values") as caught:
        check_ranks(nn.Linear(3, 3), Data(), Two(("4567", 10, 7, "some data")))
    assert "a seed" in caught.value.do


def jagged(shift=0):
    for start in range(shift, 12, 4):
        yield (torch.arange(start, start + 6), torch.tensor([0, 2, 2, 3])), torch.zeros(4)


@pytest.mark.parametrize(
    ("use", "whole", "words"),
    [
        ("train", False, "all ranks have read the same batch"),
        ("evaluate", True, "world.strategy=staged cuts batches"),
    ],
)
def test_jagged_batches_that_ranks_cannot_share(use, whole, words):
    part = part_of(as_source(jagged), Two(None), use=use, whole=whole)
    with pytest.raises(DataError, match=words):
        next(part.batches(0))


def test_jagged_batches_of_each_rank():
    source = as_source([*jagged()])
    theirs = Two([True, ["0123"]])
    first, *_ = part_of(source, theirs, use="train").batches(0)
    assert (first.size, first.copies) == (4, 1)
    with pytest.raises(DataError, match="no common order"):
        next(part_of(source, theirs, use="predict").batches(0))
    # Evaluated by all, and counted once.
    first, *_ = part_of(source, Two(None)).batches(0)
    assert (first.size, first.copies, first.whole) == (4, 2, 4)
