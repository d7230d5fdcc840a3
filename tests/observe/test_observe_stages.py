"""The stages of a chain of datapipes, as a DataLoader has it, and in which order samples come."""

import warnings

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)
from torch.utils.data.datapipes.iter import IterableWrapper, Zipper

from flatout.observe.loaders import facts_of, stages_of


def test_stages_are_told_from_the_source_on_also_within_the_loaders_wrapper():
    pipe = IterableWrapper(range(8)).shuffle().sharding_filter().batch(2)
    chain = ["IterableWrapper", "Shuffler", "ShardingFilter", "Batcher"]
    assert stages_of(pipe) == chain
    for workers in (0, 1):
        loader = DataLoader(pipe, batch_size=None, num_workers=workers)
        assert facts_of(loader, None).stages == chain
    assert len(list(pipe)) == 4  # nothing was taken from it


def test_a_chain_is_told_up_to_where_several_join():
    parts = [IterableWrapper(range(4)).batch(2) for _ in range(2)]
    assert stages_of(Zipper(*parts).shuffle()) == ["Zipper", "Shuffler"]


def test_other_datasets_have_no_stages():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert facts_of(DataLoader(TensorDataset(torch.ones(2))), None).stages is None


@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
def test_the_order_is_that_of_a_batch_sampler_of_the_scripts_own(kind):
    data = TensorDataset(torch.ones(8))
    facts = facts_of(DataLoader(data, batch_sampler=BatchSampler(kind(data), 2, False)), None)
    is_drawn = kind is RandomSampler
    assert (facts.shuffles, facts.is_in_order) == (is_drawn, not is_drawn)
