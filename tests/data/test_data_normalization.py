"""uint8 images as float32: the same wherever it is done, and last, whatever was written."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flatout
from flatout.data.batches.normalization import Normalization
from flatout.errors import DataError
from flatout.kernels import gather_rows

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def stored(rows=5, seed=0):
    """As `images` gives them: uint8 with the channels last in memory."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (rows, 4, 6, 3), generator=draw, dtype=torch.uint8)
    return pixels.permute(0, 3, 1, 2)


def textbook(x, mean, std):
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1) for v in (mean, std))
    return (x.double() / 255 - mean) / std


def test_scaling_is_that_of_the_gather_kernel():
    x = stored()
    rows = np.ascontiguousarray(x.numpy())
    want = gather_rows(rows, np.arange(len(rows)), scale=1 / 255)
    assert torch.equal(Normalization()(x), torch.from_numpy(want))
    assert Normalization()(torch.tensor([[[0, 255]]], dtype=torch.uint8)).tolist() == [[[0, 1]]]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), ((0.5,), (0.25,)), ((0.1,), STD)])
def test_normalizing_is_the_textbook_one_in_any_layout(memory_format, mean, std):
    x = stored()
    made = Normalization.of(mean, std)(x, memory_format=memory_format)
    assert made.dtype == torch.float32
    assert made.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(made.double(), textbook(x, mean, std), rtol=1e-6, atol=1e-6)
    last = Normalization.of(mean, std)(x.permute(0, 2, 3, 1), channels=3)
    assert torch.equal(last.permute(0, 3, 1, 2), made)


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 2), min_size=1, max_size=3),
)
def test_any_statistics_or_an_error(mean, std):
    channels = {len(mean), len(std)} - {1}
    if len(channels) > 1:
        with pytest.raises(DataError, match="for each channel"):
            Normalization.of(mean, std)
        return
    found = Normalization.of(mean, std)
    if channels <= {3}:
        torch.testing.assert_close(
            found(stored(2)).double(), textbook(stored(2), mean, std), rtol=1e-4, atol=1e-4
        )
    else:
        with pytest.raises(DataError, match=r"each of 2 channels.*\(3, 4, 6\)"):
            found(stored(2))


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        (0, 0, "above 0"),
        ([123.7, 116.3, 103.5], [58, 57, 57], "divide both by 255"),
        ([0.1, 0.2], [1, 1, 1], "for each channel"),
        ("abc", 1, "a number or one each channel"),
        (float("nan"), 1, "a number or one each channel"),
        ([], 1, "a number or one each channel"),
    ],
)
def test_statistics_that_make_no_sense(mean, std, words):
    with pytest.raises(DataError, match=words):
        flatout.data.arrays(stored()).normalize(mean, std)


def test_a_pipeline_normalizes_last_and_caches_bytes():
    x, y = stored(8), torch.arange(8)
    plain = flatout.data.arrays(x, y).shuffle(seed=2)
    doubled = plain.map(lambda image, label: (image // 2, label))
    want = [Normalization.of(MEAN, STD).batch(batch) for batch in doubled.batch(3).batches(1)]
    for pipeline in (
        doubled.cache("memory").batch(3).normalize(MEAN, STD),
        doubled.normalize(MEAN, STD).cache("memory").batch(3),
    ):
        for found in (list(pipeline.batches(1)), list(pipeline.batches(1))):
            assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(found, want, strict=True))
        assert pipeline.peek(1)[0].inputs.dtype == torch.float32
        assert pipeline.in_bytes.peek(1)[0].inputs.dtype == torch.uint8
        (cached,) = pipeline._built.caches
        assert cached is pipeline.in_bytes._built.caches[0]
        assert pipeline.explanation().runs[-1] == "normalize"
    part, rest = plain.normalize().batch(2).split(0.5)
    assert (part.samples, rest.samples) == (4, 4)
    ranks = [plain.normalize().batch(4).shard(rank, 2) for rank in (0, 1)]
    both = torch.cat([next(rank.batches(0)).inputs for rank in ranks])
    assert torch.equal(both, next(plain.normalize().batch(4).batches(0)).inputs)


def test_functions_behind_normalize_and_two_of_it_are_errors():
    normal = flatout.data.arrays(stored()).normalize()
    with pytest.raises(DataError, match="put map before normalize"):
        normal.map(lambda x: x)
    with pytest.raises(DataError, match="put filter before normalize"):
        normal.batch(2).filter(lambda x: True)
    with pytest.raises(DataError, match="twice"):
        normal.normalize(0.5, 0.5)


def test_sources_that_are_mixed_are_normalized_alike_and_last():
    x, y = stored(6), torch.arange(6)
    plain = flatout.data.arrays(x, y)
    mixed = flatout.data.mix(plain.normalize(MEAN, STD), plain.normalize(MEAN, STD))
    behind = flatout.data.mix(plain, plain).normalize(MEAN, STD)
    assert mixed.normalization == behind.normalization
    (found,), (want,) = (list(one.batch(12).batches(0)) for one in (mixed, behind))
    assert torch.equal(found.inputs, want.inputs)
    assert found.inputs.dtype == torch.float32
    for other in (plain, plain.normalize()):
        with pytest.raises(DataError, match="not normalized alike"):
            flatout.data.mix(plain.normalize(MEAN, STD), other)


def test_a_conversion_writes_bytes(tmp_path):
    normal = flatout.data.arrays(stored(6), torch.arange(6)).normalize()
    with pytest.raises(DataError, match="convert writes images as bytes"):
        flatout.data.convert(normal, tmp_path / "a.rows")
    assert not list(tmp_path.glob("a.rows*"))


def test_what_is_no_image_stays(tmp_path):
    ids = torch.arange(6, dtype=torch.uint8)
    data = flatout.data.arrays({"image": stored(6), "id": ids, "x": torch.ones(6, 2)})
    batch = data.normalize().batch(6).peek(1)[0]
    assert {name: t.dtype for name, t in batch.inputs.items()} == {
        "image": torch.float32, "id": torch.uint8, "x": torch.float32,
    }  # fmt: skip
