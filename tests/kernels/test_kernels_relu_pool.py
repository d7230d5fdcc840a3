"""The kernel against torch's ReLU and max-pooling, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import relu_pool

DTYPES = [torch.float32, torch.bfloat16]
LAST = torch.channels_last
NAN, INF = float("nan"), float("inf")


def bits(tensor):
    return tensor.contiguous().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def by_torch(images, gradient):
    images = images.clone(memory_format=torch.preserve_format).requires_grad_()
    result = F.max_pool2d(F.relu(images), 2)
    result.backward(gradient)
    return result.detach(), images.grad


def by_kernel(images, gradient):
    result, codes = relu_pool.forward(images)
    return result, relu_pool.backward(gradient, codes, *images.shape[2:])


def images_of(shape, dtype, seed=0):
    """Small whole numbers, so that windows hold equal elements."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return values.contiguous(memory_format=LAST)


@pytest.fixture(params=[1, 2, 3], ids="threads={}".format)
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(1, 8, 2, 2), (3, 9, 5, 4), (2, 13, 4, 7), (5, 16, 3, 3), (2, 64, 31, 30), (40, 32, 28, 28)],
)
def test_the_same_bits(shape, dtype):
    images = images_of(shape, dtype)
    gradient = torch.randn(shape[0], shape[1], shape[2] // 2, shape[3] // 2).to(dtype)
    for ours, plain in zip(by_kernel(images, gradient), by_torch(images, gradient), strict=True):
        assert ours.dtype == plain.dtype
        assert ours.stride() == plain.stride()
        assert torch.equal(bits(ours), bits(plain))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    values=st.lists(
        st.sampled_from([-INF, -2.0, -0.0, 0.0, 1e-40, 1.0, INF, NAN, -NAN]),
        min_size=4,
        max_size=4,
    ),
    gradient=st.sampled_from([-0.0, 0.0, 1.5, -2.5, INF, NAN]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_window_of_special_values(values, gradient, dtype):
    """The first largest wins, the last NaN before all; a clamped window passes nothing on."""
    window = torch.tensor(values, dtype=dtype).reshape(1, 1, 2, 2).expand(1, 8, 2, 2)
    images = window.contiguous(memory_format=LAST)
    given_back = torch.full((1, 8, 1, 1), gradient, dtype=dtype)
    ours, plain = by_kernel(images, given_back), by_pool_then_relu(images, given_back)
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))  # 0.0 equals -0.0


def by_pool_then_relu(images, gradient):
    images = images.clone(memory_format=torch.preserve_format).requires_grad_()
    result = F.relu(F.max_pool2d(images, 2))
    result.backward(gradient)
    return result.detach(), images.grad


def test_a_negative_nan_is_seen():
    images = torch.full((1, 8, 2, 2), -1.0).contiguous(memory_format=LAST)
    images.view(torch.int32)[..., 1, 1] = -4194304  # 0xFFC00000, what an x86 makes of 0/0
    result, _ = relu_pool.forward(images)
    assert result.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_in_another_layout(dtype):
    images = images_of((2, 8, 6, 6), dtype)
    gradient = torch.randn(2, 8, 3, 3).to(dtype)
    expanded = torch.ones((), dtype=dtype).expand(2, 8, 3, 3)
    for given_back in (gradient, gradient.transpose(2, 3), expanded):
        ours, plain = by_kernel(images, given_back), by_torch(images, given_back)
        assert torch.equal(bits(ours[1]), bits(plain[1]))


def test_a_view_into_a_larger_tensor():
    """Addresses begin at the view, not at the storage."""
    whole = images_of((4, 16, 6, 6), torch.bfloat16)
    images, gradient = whole[1:3], torch.randn(2, 16, 3, 3).bfloat16()
    for ours, plain in zip(by_kernel(images, gradient), by_torch(images, gradient), strict=True):
        assert torch.equal(bits(ours), bits(plain))


GOOD = (4, 16, 20, 20)


def test_what_fits():
    assert relu_pool.fits(images_of(GOOD, torch.float32))
    assert relu_pool.fits(images_of(GOOD, torch.bfloat16))
    assert relu_pool.fits(images_of(GOOD, torch.bfloat16).requires_grad_())


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(GOOD),
        images_of(GOOD, torch.float64),
        images_of(GOOD, torch.float16),
        images_of(GOOD, torch.float32)[..., :-1],
        images_of((4, 16, 1, 400), torch.float32),
        images_of((400, 4, 20, 20), torch.float32),
        images_of((2, 8, 8, 8), torch.float32),
        images_of((0, 16, 20, 20), torch.float32),
        torch.zeros(16, 20, 20),
        torch.zeros(GOOD, device="meta").contiguous(memory_format=LAST),
        torch.nn.Parameter(images_of(GOOD, torch.float32)),
    ],
    ids=lambda images: f"{type(images).__name__}-{images.dtype}-{tuple(images.shape)}",
)
def test_what_does_not_fit(images):
    assert not relu_pool.fits(images)
