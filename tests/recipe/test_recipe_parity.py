from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_strategies import CONCRETE

from flatout.errors import RecipeError
from flatout.recipe import FIELDS, ModelFacts, Parity, of_change

NOTHING = ModelFacts()
DRAWS = ModelFacts(draws_random=True)
KEYED = ModelFacts(draws_random=True, draws_by_sample=True)
COUPLED = ModelFacts(batch_coupled=True)
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


EXPECTED = [
    ("compute.precision", "fp32", "bf16", DRAWS, Parity.TOLERANT),
    ("compute.memory_format", "contiguous", "channels_last", NOTHING, Parity.TOLERANT),
    ("compute.memory_format", "contiguous", "channels_last", DRAWS, Parity.REDRAWN),
    (
        "compute.memory_format",
        "contiguous",
        "channels_last",
        ModelFacts(draws_random=True, draws_by_layout=False),
        Parity.TOLERANT,
    ),
    ("compute.rewrites", "off", "on", DRAWS, Parity.EXACT),
    ("compute.fused_optimizer", "off", "on", NOTHING, Parity.TOLERANT),
    ("compute.compile", "off", "on", NOTHING, Parity.TOLERANT),
    ("compute.compile", "off", "on", DRAWS, Parity.REDRAWN),
    ("compute.matmul_precision", "highest", "high", NOTHING, Parity.TOLERANT),
    ("compute.deterministic", False, True, NOTHING, Parity.TOLERANT),
    ("memory.micro_batch", "whole", 8, NOTHING, Parity.TOLERANT),
    ("memory.micro_batch", "whole", 8, DRAWS, Parity.REDRAWN),
    ("memory.micro_batch", 8, 4, ModelFacts(True, True), Parity.LEARNING),
    ("memory.activation_checkpointing", "off", "on", DRAWS, Parity.EXACT),
    ("memory.activation_checkpointing", "off", "on", COUPLED, Parity.EXACT),
    ("memory.allocator", "default", "keep", NOTHING, Parity.EXACT),
    ("process.threads", 1, 2, NOTHING, Parity.TOLERANT),
    ("process.interop_threads", 1, 2, NOTHING, Parity.EXACT),
    ("process.affinity", "off", (0, 1), NOTHING, Parity.EXACT),
    ("process.flush_denormals", "off", "on", NOTHING, Parity.TOLERANT),
    ("input.workers", 0, 4, DRAWS, Parity.EXACT),
    ("input.workers", 0, 4, ModelFacts(draws_random_in_input=True), Parity.REDRAWN),
    ("input.pin_memory", "off", "on", NOTHING, Parity.EXACT),
    ("world.device", "cpu", "cuda", NOTHING, Parity.TOLERANT),
    ("world.device", "cpu", "cuda", DRAWS, Parity.REDRAWN),
    ("world.device", "cpu", "cuda", KEYED, Parity.TOLERANT),
    ("compute.memory_format", "contiguous", "channels_last", KEYED, Parity.TOLERANT),
    ("memory.micro_batch", "whole", 8, KEYED, Parity.TOLERANT),
    ("compute.dropout", "torch", "by_sample", NOTHING, Parity.EXACT),
    ("compute.dropout", "torch", "by_sample", DRAWS, Parity.REDRAWN),
    ("compute.dropout", "torch", "by_sample", KEYED, Parity.REDRAWN),
    ("world.placement", "soft", "strict", NOTHING, Parity.EXACT),
    ("world.reduction", "all_reduce", "ring", NOTHING, Parity.TOLERANT),
    ("world.compression", "off", "bf16", NOTHING, Parity.TOLERANT),
    ("world.compression", "off", "powersgd", NOTHING, Parity.LEARNING),
    ("world.compression", "powersgd", "fp16", NOTHING, Parity.LEARNING),
    ("world.powersgd_rank", 4, 2, NOTHING, Parity.LEARNING),
    ("world.timeout", 600, 60, NOTHING, Parity.EXACT),
    ("world.patience", 30, 60, NOTHING, Parity.EXACT),
    ("save.every", None, 5, NOTHING, Parity.EXACT),
    ("save.keep_last", 3, 5, NOTHING, Parity.EXACT),
    ("save.asynchronous", True, False, NOTHING, Parity.EXACT),
    ("save.pieces", "merged", "per_rank", NOTHING, Parity.EXACT),
    ("script.persistent_workers", "as_written", "on", DRAWS, Parity.EXACT),
    (
        "script.persistent_workers",
        "as_written",
        "on",
        ModelFacts(draws_random_in_input=True),
        Parity.REDRAWN,
    ),
    ("script.cache", "as_written", "memory", DRAWS, Parity.EXACT),
    ("script.features", "as_written", "memory", NOTHING, Parity.TOLERANT),
    ("script.zero_grad", "as_written", "set_to_none", NOTHING, Parity.EXACT),
    ("script.garbage", "as_written", "scheduled", NOTHING, Parity.EXACT),
    ("script.empty_cache", "as_written", "skip", NOTHING, Parity.EXACT),
    ("script.host_syncs", "as_written", "deferred", NOTHING, Parity.EXACT),
    ("script.log_every", None, 50, NOTHING, Parity.EXACT),
    ("script.evaluation", "as_written", "no_grad", NOTHING, Parity.EXACT),
    ("script.cudnn_benchmark", "as_written", "on", NOTHING, Parity.TOLERANT),
    ("script.gradient_sync", "as_written", "last_backward", NOTHING, Parity.TOLERANT),
    ("script.unused_parameters", "as_written", "no_search", NOTHING, Parity.EXACT),
]


@pytest.mark.parametrize(("field", "before", "after", "facts", "expected"), EXPECTED)
def test_a_change_is_judged_for_the_model(field, before, after, facts, expected):
    assert of_change(field, before, after, facts) is expected


def test_every_field_is_judged():
    assert {case[0] for case in EXPECTED} == set(FIELDS)


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
def test_torch_draws_the_same_mask_in_bf16(device):
    import torch

    x = torch.ones(64, 1024, device=device)
    dropout = torch.nn.Dropout()
    assert torch.equal(_mask(dropout, x), _mask(dropout, x.to(torch.bfloat16)))


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
