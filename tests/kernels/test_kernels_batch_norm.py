"""The kernel against torch's BatchNorm in double precision, to a bound."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import batch_norm

LAST = torch.channels_last
EPSILON = 1e-5
# A result is rounded once to its own dtype; in between all is float32.
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-8}


def parts_of(shape, dtype, layout=LAST, seed=0, offset=1.0):
    generator = torch.Generator().manual_seed(seed)

    def made():
        return torch.randn(shape, generator=generator).to(dtype).contiguous(memory_format=layout)

    weight, bias = torch.randn(2, shape[1], generator=generator)
    return (made() * 2 + offset).contiguous(memory_format=layout), made(), weight, bias, made()


def by_torch(x, skip, weight, bias, gradient, activation, wants_skip, y):
    """All in double; the activation lets through what it did for `y`, the kernel's own result."""
    x, weight, bias, gradient = (t.double().requires_grad_() for t in (x, weight, bias, gradient))
    result = F.batch_norm(x, None, None, weight, bias, True, 0.0, EPSILON)
    if wants_skip:
        result = result + skip.double()
    let_through = torch.ones_like(result)
    if activation is not None:
        let_through = (y > 0).double()
    if activation == "relu6":
        let_through = let_through * (y < 6)
    masked = gradient * let_through
    given = torch.autograd.grad(result, [x, weight, bias], masked)
    acted = {None: lambda t: t, "relu": F.relu, "relu6": F.relu6}[activation](result)
    return acted, (*given, masked)


def by_kernel(x, skip, weight, bias, gradient, activation, wants_skip):
    skip = skip if wants_skip else None
    y, saved = batch_norm.forward(x, weight, bias, skip, activation, EPSILON)
    seen = y if wants_skip and activation else None
    return y, batch_norm.backward(x, seen, gradient, saved, wants_skip), saved


def assert_near(ours, plain, bound):
    assert ours.shape == plain.shape
    plain = plain.detach()
    scale = max(1.0, float(plain.abs().max()))
    assert float((ours.double() - plain).abs().max()) <= bound * scale


def check(shape, dtype, layout, activation, wants_skip, seed=0, offset=1.0):
    x, skip, weight, bias, gradient = parts_of(shape, dtype, layout, seed, offset)
    y, given, saved = by_kernel(x, skip, weight, bias, gradient, activation, wants_skip)
    plain, wanted = by_torch(x, skip, weight, bias, gradient, activation, wants_skip, y)
    assert y.dtype is given[0].dtype is dtype
    assert y.stride() == given[0].stride() == x.stride()
    assert_near(y, plain, BOUND[dtype])
    dims = [d for d in range(x.dim()) if d != 1]
    assert_near(saved.moments[0], x.double().mean(dims), 4e-6)
    assert_near(saved.moments[1], x.double().var(dims, unbiased=False), 1e-5)
    assert_near(given[0], wanted[0], BOUND[dtype])
    for ours, one in zip(given[1:3], wanted[1:3], strict=True):
        assert_near(ours, one, 1e-5)
    if wants_skip:
        assert torch.equal(given[3].double(), wanted[3].detach())


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    shape=st.tuples(
        st.integers(1, 4), st.integers(1, 70), st.integers(1, 9), st.integers(1, 40)
    ).filter(lambda s: s[0] * s[2] * s[3] >= 16),
    dtype=st.sampled_from(list(BOUND)),
    layout=st.sampled_from([LAST, torch.contiguous_format]),
    case=st.sampled_from(
        [(None, False), ("relu", False), ("relu6", False), (None, True), ("relu", True)]
    ),
    seed=st.integers(0, 2**20),
)
def test_within_the_bound(shape, dtype, layout, case, seed):
    check(shape, dtype, layout, *case, seed=seed)


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format])
@pytest.mark.parametrize("shape", [(32, 64, 16, 16), (8, 3, 64, 64), (2, 2048, 4, 4)])
def test_many_portions(shape, dtype, layout):
    check(shape, dtype, layout, "relu", True)


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("shape", [(600, 40), (9, 5, 700), (2, 3, 4, 5, 6)])
def test_other_dimensions(shape, dtype):
    x, skip, weight, bias, gradient = parts_of(shape, dtype, torch.contiguous_format)
    y, given, _ = by_kernel(x, skip, weight, bias, gradient, "relu", False)
    plain, wanted = by_torch(x, skip, weight, bias, gradient, "relu", False, y)
    assert_near(y, plain, BOUND[dtype])
    for ours, one in zip(given[:3], wanted[:3], strict=True):
        assert_near(ours, one, BOUND[dtype])


def test_a_mean_far_from_zero_costs_no_more_than_torch_loses():
    x, _, weight, bias, _ = parts_of((64, 16, 8, 8), torch.float32, offset=1000.0)
    _, saved = batch_norm.forward(x, weight, bias, None, None, EPSILON)
    assert_near(saved.moments[1], x.double().var((0, 2, 3), unbiased=False), 1e-5)


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format])
def test_the_same_bits_on_any_number_of_threads(layout):
    parts = parts_of((16, 24, 33, 31), torch.bfloat16, layout)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 3):
        torch.set_num_threads(threads)
        y, given, saved = by_kernel(*parts, "relu", True)
        found.append([y, *given, saved.moments])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("activation", [None, "relu", "relu6"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_stays_in_its_channel(dtype, activation, value):
    x, _, weight, bias, gradient = parts_of((4, 8, 6, 6), dtype)
    x[1, 3, 2, 2] = value
    y, given, _ = by_kernel(x, None, weight, bias, gradient, activation, False)
    others = [c for c in range(8) if c != 3]
    assert y[:, 3].isnan().all()
    assert given[0][:, 3].isnan().all()
    assert y[:, others].isfinite().all()
    assert given[0][:, others].isfinite().all()


def test_without_weight_and_bias():
    x, _, _, _, gradient = parts_of((4, 8, 6, 6), torch.float32)
    y, saved = batch_norm.forward(x, None, None, None, "relu", EPSILON)
    ones, zeros = torch.ones(8), torch.zeros(8)
    again, same = batch_norm.forward(x, ones, zeros, None, "relu", EPSILON)
    assert torch.equal(y, again)
    for a, b in zip(
        batch_norm.backward(x, None, gradient, saved, False)[:3],
        batch_norm.backward(x, None, gradient, same, False)[:3],
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_gradient_in_another_layout_or_dtype():
    x, _, weight, bias, gradient = parts_of((4, 8, 6, 6), torch.bfloat16)
    _, saved = batch_norm.forward(x, weight, bias, None, "relu", EPSILON)
    wanted = batch_norm.backward(x, None, gradient, saved, False)[0]
    for other in (gradient.contiguous(), gradient.float()):
        assert torch.equal(batch_norm.backward(x, None, other, saved, False)[0], wanted)


GOOD = (4, 16, 24, 24)


def fits(x, weight=None, skip=None):
    return batch_norm.fits(x, weight, None, skip=skip)


def test_what_fits():
    x, skip, *_ = parts_of(GOOD, torch.bfloat16)
    assert fits(x, torch.ones(16), skip)
    assert fits(x.contiguous())
    assert fits(torch.zeros(512, 64))


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.zeros(GOOD, dtype=torch.float64),),
        (torch.zeros(GOOD)[..., :-1],),
        (torch.zeros(2, 8, 4, 4),),
        (torch.zeros(0, 16, 24, 24),),
        (torch.zeros(1, 2**15),),
        (torch.zeros(64, 64, 4, 4),),
        (torch.zeros(GOOD, device="meta"),),
        (torch.zeros(GOOD), torch.ones(16).bfloat16()),
        (torch.zeros(GOOD), torch.ones(32)[::2]),
        (torch.zeros(GOOD), None, torch.zeros(GOOD).bfloat16()),
        (torch.zeros(GOOD), None, torch.zeros(16, 24, 24)),
        (torch.zeros(GOOD), None, torch.zeros(GOOD).to(memory_format=LAST)),
        (torch.nn.Parameter(torch.zeros(GOOD)),),
    ],
)
def test_what_does_not_fit(arguments):
    assert not fits(*arguments)
