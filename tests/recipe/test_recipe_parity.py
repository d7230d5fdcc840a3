from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_strategies import CONCRETE

from flatout.errors import RecipeError
from flatout.recipe import FIELDS, ModelFacts, Parity, of_change

NOTHING = ModelFacts()
all_facts = st.builds(
    ModelFacts,
    batch_coupled=st.booleans(),
    draws_random=st.booleans(),
    device=st.sampled_from(["cpu", "cuda"]),
    draws_random_in_input=st.booleans(),
    draws_by_layout=st.booleans(),
    draws_by_sample=st.booleans(),
)


def test_the_order_and_the_words():
    assert sorted(Parity) == [Parity.EXACT, Parity.TOLERANT, Parity.REDRAWN, Parity.LEARNING]
    words = [parity.words for parity in Parity]
    assert words == ["bit-identical", "rounding", "redrawn", "changes learning"]


@pytest.mark.parametrize("parity", Parity)
def test_names_and_words_lead_back(parity):
    assert Parity.from_name(parity.name.lower()) is parity
    assert Parity.from_words(parity.words) is parity


def test_unknown_name_lists_the_four():
    with pytest.raises(RecipeError, match="exact, tolerant, redrawn, learning"):
        Parity.from_name("loose")
    with pytest.raises(RecipeError, match="bit-identical, rounding, redrawn, changes learning"):
        Parity.from_words("tolerant")


@given(st.data(), st.sampled_from(FIELDS), all_facts)
def test_no_change_is_exact(data, field, facts):
    value = data.draw(CONCRETE[field])
    assert of_change(field, value, value, facts) is Parity.EXACT


@given(st.data(), st.sampled_from(FIELDS), all_facts)
def test_a_change_is_judged_the_same_both_ways(data, field, facts):
    a, b = data.draw(CONCRETE[field]), data.draw(CONCRETE[field])
    assert of_change(field, a, b, facts) is of_change(field, b, a, facts)


def test_unknown_field():
    with pytest.raises(RecipeError, match=r"did you mean compute\.precision"):
        of_change("compute.precison", "fp32", "bf16", NOTHING)


# What the rules say of torch, seen in torch.


def _mask(dropout, x, seed=0):
    import torch

    torch.manual_seed(seed)
    return dropout(x) != 0


def test_torch_fills_a_dropout_mask_in_the_order_of_memory():
    import torch

    x = torch.ones(8, 16, 12, 12)
    swapped = x.to(memory_format=torch.channels_last)
    assert not torch.equal(_mask(torch.nn.Dropout(), x), _mask(torch.nn.Dropout(), swapped))
    whole_maps = torch.nn.Dropout2d()
    assert torch.equal(_mask(whole_maps, x), _mask(whole_maps, swapped))
    after_flatten = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout())
    assert torch.equal(_mask(after_flatten, x), _mask(after_flatten, swapped))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_draws_the_same_mask_in_bf16_on_a_cpu_alone(device):
    import torch

    x = torch.ones(64, 1024, device=device)
    masks = [_mask(torch.nn.Dropout(), x.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    assert torch.equal(*masks) == (device == "cpu")


def _step(model, x, checkpointed):
    import torch
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
    out.square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_torch_checkpointing_redraws_nothing_but_updates_statistics_twice():
    import torch

    x = torch.randn(8, 4)
    for layer in (torch.nn.Dropout(), torch.nn.BatchNorm1d(4)):
        plain = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
        checkpointed = deepcopy(plain)
        for a, b in zip(_step(plain, x, False), _step(checkpointed, x, True), strict=True):
            assert torch.equal(a, b)
    assert (plain[1].num_batches_tracked, checkpointed[1].num_batches_tracked) == (1, 2)
