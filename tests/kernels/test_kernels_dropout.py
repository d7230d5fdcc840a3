"""Which elements are kept: known words, the same from C and torch, as random as they should be."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import dropout as kernel
from flatout.kernels.dropout import Draw

CPU = torch.device("cpu")
DRAW = Draw(seed=2**63 + 12345, step=7, draw=3, start=5, samples=6)


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_words_that_the_authors_of_philox_publish(counter, seed, words):
    """The known answers that come with Random123."""
    assert [int(word) for word in kernel._philox([torch.tensor(c) for c in counter], seed)] == words


@settings(deadline=None, max_examples=60)
@given(
    outer=st.integers(1, 4),
    samples=st.integers(1, 5),
    rest=st.integers(1, 140),
    p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 1 - 1e-12]),
    seed=st.integers(0, 2**64 - 1),
    words=st.tuples(*[st.integers(0, 2**32 - 1)] * 3),
)
def test_c_and_torch_keep_the_same(outer, samples, rest, p, seed, words):
    draw = Draw(seed, *words, samples, outer)
    shape = (outer, samples, rest)
    by_torch = kernel._keep_by_torch(shape, p, draw, CPU)
    assert torch.equal(kernel.keep(shape, p, draw, CPU), by_torch)
    assert torch.equal(plainly(shape, p, draw), by_torch)


def plainly(shape, p, draw):
    """By C without vectors, on this thread."""
    kept = torch.empty(shape, dtype=torch.bool)
    rest = kept.numel() // (draw.outer * draw.samples)
    kernel._c.run(
        0, kept.data_ptr(), 1, draw.outer, draw.samples, rest, 0, 0, draw.start, draw.draw,
        draw.step, draw.seed, kernel._threshold(p), 1.0, 0, 1, True,
    )  # fmt: skip
    return kept


SHAPES = [(6, 33), (6, 1), (12, 5, 7), (6, 70, 5, 7), (6, 3, 40, 40), (6, 8, 3, 4, 5)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_c_and_torch_give_the_same_bits(shape, dtype, threads, monkeypatch):
    x = torch.randn(shape).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        by_c = kernel.dropout(x, 0.3, DRAW)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(kernel, "_c", None)
    by_torch = kernel.dropout(x, 0.3, DRAW)
    assert by_c.dtype == dtype
    assert torch.equal(by_c, by_torch)
    assert torch.equal(by_c.signbit(), by_torch.signbit())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 70, 5, 7), (6, 3, 40, 40), (12, 5, 7, 2), (6, 8, 3, 4, 5)])
def test_the_memory_format_changes_nothing(shape, dtype):
    x = torch.randn(shape).to(dtype)
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    other = x.contiguous(memory_format=last)
    result = kernel.dropout(other, 0.3, DRAW)
    assert torch.equal(result, kernel.dropout(x, 0.3, DRAW))
    if dtype != torch.float16:
        assert result.stride() == other.stride()
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(kernel.dropout(strided, 0.3, DRAW), result)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_in_place(layout):
    x = torch.randn(6, 40, 5, 5).contiguous(memory_format=layout)
    expected = kernel.dropout(x, 0.3, DRAW)
    assert kernel.dropout(x, 0.3, DRAW, out=x) is x
    assert torch.equal(x, expected)
    x.copy_(torch.randn_like(x))
    inner = x[:, :, 1:4]
    of_inner = kernel.dropout(inner, 0.3, DRAW)
    kernel.dropout(inner, 0.3, DRAW, out=inner)
    assert torch.equal(x[:, :, 1:4], of_inner)


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_what_is_kept_is_scaled_and_a_nan_stays(p):
    x = torch.full((6, 1000), 3.0)
    result = kernel.dropout(x, p, DRAW)
    kept = kernel.keep(x.shape, p, DRAW, CPU) if p < 1 else torch.zeros(6, 1000, dtype=torch.bool)
    assert torch.equal(
        result, torch.where(kept, x * (torch.tensor(1 / (1 - p)) if p < 1 else 0), 0)
    )
    assert kernel.dropout(x * math.nan, p, DRAW).isnan().all()


def test_any_part_of_the_samples_alone():
    """As ranks and micro-batches have them."""
    x = torch.randn(6, 3, 50)
    whole = kernel.dropout(x, 0.4, DRAW)
    for first, count in ((0, 1), (1, 4), (5, 1)):
        part = DRAW._replace(start=DRAW.start + first, samples=count)
        rows = slice(first, first + count)
        assert torch.equal(kernel.dropout(x[rows], 0.4, part), whole[rows])
        # time first: (3, samples, 50)
        parts = kernel.dropout(x.transpose(0, 1)[:, rows], 0.4, part._replace(outer=3))
        assert torch.equal(parts.transpose(0, 1), whole[rows])


# -- how random ------------------------------------------------------------------------------------

KEPT = 0.7
# Of a statistic that is normal with variance 1: once in 15 million fixed seeds beyond.
_FAR = 5.4


def far(share, count, expected=KEPT):
    return abs(share - expected) / math.sqrt(expected * (1 - expected) / count)


def masks():
    """(seeds, steps, draws, samples, elements)"""
    return torch.stack(
        [
            torch.stack(
                [
                    torch.stack(
                        [kernel.keep((8, 4096), 1 - KEPT, Draw(seed, step, draw, 0, 8), CPU)
                         for draw in range(3)]
                    )
                    for step in range(3)
                ]
            )
            for seed in (0, 1, 2**32)
        ]
    ).double()  # fmt: skip


def test_as_many_are_kept_as_should_be():
    kept = masks()
    assert far(kept.mean(), kept.numel()) < _FAR
    for axis in range(kept.dim()):
        others = [a for a in range(kept.dim()) if a != axis]
        shares = kept.mean(others)
        assert all(far(share, kept.numel() // len(shares)) < _FAR for share in shares)


@pytest.mark.parametrize("axis", range(5), ids=["seeds", "steps", "draws", "samples", "elements"])
def test_neighbors_have_nothing_to_do_with_each_other(axis):
    """Correlations of +-1 and +-8 apart, in units of their standard deviation."""
    kept = masks() - KEPT
    for distance in (1, 2, 4, 8, 32):
        if distance >= kept.shape[axis]:
            continue
        a = kept.narrow(axis, 0, kept.shape[axis] - distance)
        b = kept.narrow(axis, distance, kept.shape[axis] - distance)
        correlation = float((a * b).sum()) / (KEPT * (1 - KEPT)) / math.sqrt(a.numel())
        assert abs(correlation) < _FAR


def test_runs_of_eight_are_as_frequent_as_they_should_be():
    """A chi-square test of all 256 patterns of eight elements side by side."""
    kept = kernel.keep((64, 8192), 0.5, Draw(9, 1, 0, 0, 64), CPU).numpy()
    patterns = np.packbits(kept.reshape(-1, 8), axis=1).ravel()
    found = np.bincount(patterns, minlength=256)
    expected = len(patterns) / 256
    chi_square = ((found - expected) ** 2 / expected).sum()
    # 255 degrees of freedom: mean 255, standard deviation sqrt(510).
    assert abs(chi_square - 255) < _FAR * math.sqrt(510)


# -- bad input -------------------------------------------------------------------------------------


def test_the_extension_refuses_samples_of_too_many_elements():
    """Before it reads from any address."""
    numbers = {
        "x": 0, "out": 0, "item": 4, "outer": 2**20, "samples": 1, "rest": 2**20, "channels": 0,
        "spatial": 0, "start": 0, "draw": 0, "step": 0, "seed": 0, "threshold": 0, "scale": 1.0,
        "parallel": 0, "threads": 1, "is_plain": False,
    }  # fmt: skip
    with pytest.raises(ValueError, match="2\\*\\*34"):
        kernel._c.run(*numbers.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gpu_keeps_the_same(shape, dtype):
    x = torch.randn(shape).to(dtype)
    on_gpu = kernel.dropout(x.cuda(), 0.3, DRAW)
    assert torch.equal(on_gpu.cpu(), kernel.dropout(x, 0.3, DRAW))
