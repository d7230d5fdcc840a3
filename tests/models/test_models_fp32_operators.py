"""Attention and strided depthwise convolutions in fp32 under autocast to bf16."""

from __future__ import annotations

import copy
import io
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flatout.models import keep_in_fp32, may_be_slower_in_bf16

BF16 = torch.bfloat16


def depthwise(stride=2):
    return nn.Conv2d(8, 8, 3, stride, 1, groups=8, bias=False)


class Attends(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@contextmanager
def kept(model=None):
    undo = keep_in_fp32(model or nn.Identity())
    try:
        yield model
    finally:
        for step in reversed(undo):
            step()


def cast(dtype=BF16):
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize(
    ("model", "is_slower"),
    [
        (nn.Sequential(depthwise()), True),
        (nn.Conv1d(4, 8, 3, 2, groups=4), True),
        (Attends(), True),
        (nn.TransformerEncoderLayer(8, 2), True),
        (nn.Sequential(depthwise(1)), False),
        (nn.Conv2d(8, 8, 3, 2), False),
        (nn.Conv2d(8, 8, 3, 2, groups=2), False),
        (nn.Conv2d(1, 8, 3, 2), False),
        (nn.Linear(2, 2), False),
    ],
)
def test_which_models_have_such_operators(model, is_slower):
    assert may_be_slower_in_bf16(model) is is_slower


@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(0, 3),
    side=st.integers(3, 9),
    channels_last=st.booleans(),
    dtype=st.sampled_from([torch.float32, BF16]),
)
def test_a_convolution_is_that_of_fp32_rounded_once(size, side, channels_last, dtype):
    model, x = depthwise(), torch.randn(size, 8, side, side).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    ours, plain = (x.clone().requires_grad_() for _ in range(2))
    twin = copy.deepcopy(model)
    with kept(model), cast():
        result = model(ours)
    wanted = twin(plain.float()).to(BF16)
    assert result.dtype is BF16
    assert torch.equal(result, wanted)
    gradient = torch.randn_like(result)
    result.backward(gradient)
    wanted.backward(gradient)
    assert ours.grad.dtype is dtype
    assert torch.equal(ours.grad, plain.grad)
    assert torch.equal(model.weight.grad, twin.weight.grad)


@settings(deadline=None, max_examples=30)
@given(
    shape=st.tuples(*(st.integers(1, 5) for _ in range(4))),
    is_causal=st.booleans(),
    mask=st.sampled_from([None, torch.bool, torch.float32, BF16]),
    scale=st.sampled_from([None, 0.5]),
    dtype=st.sampled_from([torch.float32, BF16]),
)
def test_attention_is_that_of_fp32_rounded_once(shape, is_causal, mask, scale, dtype):
    ours = torch.randn(3, *shape).to(dtype)
    # Not contiguous, as heads are.
    ours = ours.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    plain = ours.detach().clone().requires_grad_()
    options = {"is_causal": is_causal and mask is None, "scale": scale}
    if mask is not None:
        options["attn_mask"] = torch.ones(shape[2], shape[2], dtype=mask)
    with kept(), cast():
        result = F.scaled_dot_product_attention(*ours, **options)
    if mask is BF16:
        options["attn_mask"] = options["attn_mask"].float()
    wanted = F.scaled_dot_product_attention(*plain.float(), **options).to(BF16)
    assert result.dtype is BF16
    assert torch.equal(result, wanted)
    result.sum().backward()
    wanted.sum().backward()
    assert torch.equal(ours.grad, plain.grad)


def test_dropout_in_attention_draws_as_in_fp32():
    x = torch.randn(1, 2, 6, 4)
    torch.manual_seed(1)
    with kept(), cast():
        result = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(result, F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).to(BF16))


@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_other_dtypes_are_left_as_they_are(dtype):
    model, x = nn.Sequential(depthwise(), Attends()), torch.randn(2, 8, 9, 9)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        before = model(x)
        with kept(model):
            result = model(x)
    assert result.dtype is before.dtype
    assert torch.equal(result, before)


def test_float64_stays():
    x = torch.randn(1, 2, 6, 4).double()
    with kept(), cast():
        assert F.scaled_dot_product_attention(x, x, x).dtype is torch.float64
        assert torch.equal(Attends()(x), F.scaled_dot_product_attention(x, x, x))


def test_undo_leaves_nothing_behind():
    model, x = nn.Sequential(depthwise(), Attends()), torch.randn(2, 8, 9, 9)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    keys = list(model.state_dict())
    with cast():
        plain = model(x)
        for _ in range(2):
            with kept(model):
                assert list(model.state_dict()) == keys
                assert not torch.equal(model(x), plain)
            assert torch.equal(model(x), plain)
    assert {name: vars(m) for name, m in model.named_modules()} == before


def test_a_forward_that_somebody_replaced_is_left_alone():
    model = nn.Sequential(depthwise())
    mine = model[0].forward = lambda x: x + 1
    with kept(model):
        assert model[0].forward is mine
    assert model[0].forward is mine


def test_a_copy_and_a_pickled_model():
    model, x = nn.Sequential(depthwise()), torch.randn(2, 8, 9, 9)
    with kept(model), cast():
        result = model(x)
        copied, file = copy.deepcopy(model), io.BytesIO()
        nn.init.zeros_(model[0].weight)
        assert torch.equal(copied(x), result)
        torch.save(copied, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded[0].forward.__func__ is nn.Conv2d.forward


@pytest.mark.slow
def test_it_can_be_compiled():
    model, x = nn.Sequential(depthwise(), Attends()), torch.randn(2, 8, 9, 9)
    with kept(model), cast():
        plain = model(x)
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), plain)
