"""What is refused before several ranks train one model."""

import pytest
from torch import nn

from flatout.errors import ModelError, WorldError
from flatout.train.ranks import check_ranks
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


class BatchNormalization(nn.Module):
    """Such as Keras'."""


def test_statistics_of_a_part_of_the_batch_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), BatchNormalization())
    with pytest.raises(ModelError, match=r"1 \(BatchNormalization\) takes its statistics over"):
        check_ranks(model, None, Two(None))


def test_layers_of_torch_are_synchronised():
    check_ranks(nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3)), None, Two(None))


def test_other_data_on_another_rank():
    check_ranks(nn.Linear(3, 3), Data(), Two(None))
    with pytest.raises(WorldError, match=r"different data(.|\n)*rank 1: other data, batches of 10"):
        check_ranks(nn.Linear(3, 3), Data(), Two(("4567", 10, 7, "other data")))
