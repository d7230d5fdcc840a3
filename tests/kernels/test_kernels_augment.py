"""Parts, orientations, colors and boxes of images: as numpy and torch have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import augment
from flatout.kernels.augment import ONE, change_images

# Bytes of the vectors that may be used, where the processor has them.
WAYS = (0, 16, 32)
_LENGTHS = st.integers(1, 24)


def images(rows, height, width, channels, seed=0, dtype=np.uint8):
    values = np.random.default_rng(seed).integers(0, 256, (rows, height, width, channels))
    return values.astype(dtype)


def changed(source, size, places=(0, 0, 0), way=32, **more):
    """In the middle of memory that is to stay."""
    more = {name: np.asarray(values, np.int64) for name, values in more.items()}
    rows = len(more.get("index", source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "_VECTORS", way)
        whole = np.full((rows + 2, *size, source.shape[3]), 77, source.dtype)
        places = np.broadcast_to(np.asarray(places, np.int64), (rows, 3)).copy()
        change_images(source, whole[1:-1], places, **more)
    assert (whole[[0, -1]] == 77).all()
    return whole[1:-1]


def same_in_all_ways(*arguments, **more):
    first, *others = (changed(*arguments, way=way, **more) for way in WAYS)
    for way, other in zip(WAYS[1:], others, strict=True):
        assert np.array_equal(first, other), way
    return first


def cut_out(image, top, left, size):
    """By numpy: what lies outside of the image is 0."""
    wide = np.pad(image, ((size[0] + 30,) * 2, (size[1] + 30,) * 2, (0, 0)))
    top, left = top + size[0] + 30, left + size[1] + 30
    return wide[top : top + size[0], left : left + size[1]]


def by_torch(image, part, size):
    top, left, high, wide = part
    crop = torch.from_numpy(image[top : top + high, left : left + wide].copy())
    batch = crop.permute(2, 0, 1).unsqueeze(0).contiguous(memory_format=torch.channels_last)
    made = torch.nn.functional.interpolate(batch, size, mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def turned(image, orientation):
    return np.rot90(image[:, ::-1] if orientation & 4 else image, orientation & 3)


@settings(deadline=None, max_examples=100)
@given(
    _LENGTHS, _LENGTHS, st.sampled_from([1, 2, 3, 3, 4]), st.sampled_from([np.uint8, np.float32]),
    st.booleans(), st.data(),
)  # fmt: skip
def test_parts_are_those_of_numpy(height, width, channels, dtype, square, data):
    source = images(3, height, width, channels, dtype=dtype)
    size = data.draw(st.tuples(_LENGTHS, _LENGTHS))
    size = (size[0], size[0]) if square else size
    place = st.tuples(st.integers(-30, 30), st.integers(-30, 30), st.sampled_from(range(8)))
    places = data.draw(st.tuples(place, place))
    if not square:
        places = [(top, left, orientation & ~1) for top, left, orientation in places]
    box = data.draw(st.tuples(*[st.integers(-30, 30)] * 4))
    more = {"index": data.draw(st.permutations(range(3)))[:2], "boxes": [box, (0, 0, 0, 0)]}
    found = same_in_all_ways(source, size, places, **more)
    for row, (top, left, orientation) in enumerate(places):
        expected = turned(cut_out(source[more["index"][row]], top, left, size), orientation).copy()
        first, start, last, stop = np.clip(more["boxes"][row], 0, None)
        expected[first:last, start:stop] = 0
        assert np.array_equal(found[row], expected)


@pytest.mark.parametrize("width", [1, 5, 6, 7, 11, 32, 33, 224])
def test_orientations_are_torchs(width):
    source = images(8, width, width, 3)
    found = changed(source, (width, width), [(0, 0, orientation) for orientation in range(8)])
    for orientation, image in enumerate(torch.from_numpy(source)):
        mirrored = image.flip(1) if orientation & 4 else image
        assert torch.equal(torch.from_numpy(found[orientation]), mirrored.rot90(orientation & 3))


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from([1, 2, 3, 3, 3, 4]), st.sampled_from(range(8)), st.booleans(), st.data(),
)  # fmt: skip
def test_resized_parts_are_torchs_byte_for_byte(shape, size, channels, orientation, small, data):
    size = (size[0], size[0]) if orientation % 2 else size
    high, wide = (min(n, data.draw(st.integers(1, 20))) if small else n for n in shape)
    top, left = (data.draw(st.integers(0, n - m)) for n, m in zip(shape, (high, wide), strict=True))
    # Pixels of 0 and 255 show what an interpolation adds up to.
    source = images(1, *shape, channels, seed=high)
    source = np.where(source < 60, 0, np.where(source > 190, 255, source)).astype(np.uint8)
    parts = [(top, left, high, wide)]
    found = same_in_all_ways(source, size, (0, 0, orientation), parts=parts)
    assert np.array_equal(found[0], turned(by_torch(source[0], parts[0], size), orientation))


@pytest.mark.parametrize("sizes", [((500, 375), (224, 224)), ((97, 311), (64, 300))])
def test_parts_of_several_large_images_are_resized_as_torch_does(sizes):
    shape, size = sizes
    source = images(2, *shape, 3)
    rng = np.random.default_rng(1)
    index = rng.integers(2, size=12)
    lengths = np.stack([rng.integers(n // 4, n + 1, 12) for n in shape], 1)
    begins = rng.integers(np.array(shape) - lengths + 1)
    parts = np.hstack([begins, lengths])
    found = same_in_all_ways(source, size, (0, 0, 4), index=index, parts=parts)
    for image, at, part in zip(found, index, parts, strict=True):
        assert np.array_equal(image, turned(by_torch(source[at], part, size), 4))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 24), st.integers(1, 90), st.sampled_from([1, 3, 3]), st.integers(0, 2**32 - 1),
    st.tuples(*[st.floats(0, 3) | st.sampled_from([0.0, 1.0, 2.0, 100.0])] * 3),
)  # fmt: skip
def test_colors_are_about_torchvisions(height, width, channels, seed, by):
    pixels = images(1, height, width, channels, seed)
    by = (*by[:2], by[2] if channels == 3 else 1.0)
    factors = [[round(factor * ONE) for factor in by]]
    same_in_all_ways(pixels, (height, width), factors=factors)
    for at in range(3):  # each alone: one that follows enlarges what another has rounded
        alone = [ONE] * 3
        alone[at] = factors[0][at]
        exact = by_torchvision(pixels[0], at, alone[at] / ONE)
        # A gray that is rounded to the other side counts as often as it is taken off.
        most = 1 + (abs(1 - alone[at] / ONE) if at else 0)
        found = changed(pixels, (height, width), factors=[alone])[0].astype(int)
        assert np.abs(found - exact).max(initial=0) <= most


def test_every_byte_times_every_kind_of_factor_is_the_same_by_vectors():
    ramp = np.arange(256, dtype=np.uint8)
    columns = np.stack([ramp, ramp[::-1], np.roll(ramp, 77)], 1)
    pixels = np.ascontiguousarray(np.broadcast_to(columns, (1, 3, 256, 3)))
    for value in (0, 1, 32_767, 32_768, 65_535, 65_536, 65_537, 98_304, 131_071, 6_553_600):
        for at in range(3):
            factors = [[value if k == at else 50_000 for k in range(3)]]
            same_in_all_ways(pixels, (3, 256), factors=factors)


def by_torchvision(image, at, factor):
    """What torchvision's adjust_brightness, adjust_contrast and adjust_saturation compute."""
    image = torch.from_numpy(image).float()
    gray = image
    if image.shape[2] == 3:
        gray = (0.2989 * image[..., :1] + 0.587 * image[..., 1:2] + 0.114 * image[..., 2:]).floor()
    other = (torch.zeros(()), gray.mean(), gray)[at]
    return (factor * image + (1 - factor) * other).clamp(0, 255).to(torch.uint8).numpy().astype(int)


def test_images_need_not_follow_each_other_closely():
    memory = np.random.default_rng(0).integers(0, 256, (4, 1_000), np.uint8)
    source = memory[:, 40 : 40 + 7 * 9 * 3].reshape(4, 7, 9, 3)
    assert np.shares_memory(source, memory)
    factors = [(50_000, 60_000, 0)] * 4
    more = {"index": [3, 0, 3, 1], "parts": [(1, 2, 5, 6)] * 4, "factors": factors}
    found = same_in_all_ways(source, (12, 12), (0, 0, 3), **more)
    assert np.array_equal(found, changed(source.copy(), (12, 12), (0, 0, 3), **more))
    del more["factors"]
    floats = same_in_all_ways(source / np.float32(255), (12, 12), (0, 0, 3), **more)
    rounded = changed(source, (12, 12), (0, 0, 3), **more).astype(int)
    assert np.abs(floats * 255 - rounded).max() < 1.1


def test_strides_of_dimensions_of_length_1_do_not_matter():
    for shape in [(1, 4, 5, 3), (4, 1, 5, 3), (4, 5, 1, 3), (4, 5, 3, 1), (1, 1, 1, 1)]:
        source = images(*shape)
        strides = [1_000 if n == 1 else at for n, at in zip(shape, source.strides, strict=True)]
        seen = np.lib.stride_tricks.as_strided(source, shape, strides)
        assert np.array_equal(changed(seen, shape[1:3]), source)


def test_bad_arrays_are_errors_and_never_a_crash():
    good, out = images(2, 4, 5, 3), np.zeros((2, 3, 3, 3), np.uint8)
    index, places = np.arange(2), np.zeros((2, 3), np.int64)
    parts, factors = np.tile([0, 0, 4, 5], (2, 1)), np.full((2, 3), ONE)
    for wrong, words in [
        ({"index": index[:1]}, r"index: expected int64 of shape \(rows,\)"),
        ({"index": places}, r"index: expected int64 of shape \(rows,\)"),
        ({"source": good[..., :2].copy()}, "the same bytes"),
        ({"source": good[:, :, ::-1]}, "C-contiguous each"),
        ({"source": good[::-1]}, "C-contiguous each"),
        ({"source": good[0]}, r"uint8 of shape \(rows, height, width, bytes\)"),
        ({"places": places[:1]}, r"places: expected int64 of shape \(rows, 3\)"),
        ({"places": places.astype(np.int32)}, "int64"),
        ({"places": places + np.array([0, 0, 8])}, "0 to 7"),
        ({"places": places - np.array([0, 0, 1])}, "0 to 7"),
        ({"places": places + np.array([2**40, 0, 0])}, r"within 2\^31"),
        ({"out": good[:, :3, :3]}, "C-contiguous"),
        ({"out": out[:, :, :2].copy(), "places": places + 1}, "only squares"),
        ({"parts": parts + np.array([1, 0, 0, 0])}, "parts within the images"),
        ({"parts": parts + np.array([0, 0, 0, 1])}, "parts within the images"),
        ({"parts": parts - np.array([0, 0, 4, 0])}, "parts within the images"),
        ({"parts": parts - np.array([0, 1, 0, 0])}, "parts within the images"),
        ({"parts": parts[:, :3].copy()}, r"parts: expected int64 of shape \(rows, 4\)"),
        ({"factors": factors[:1]}, r"int64 of shape \(rows, 3\)"),
        ({"factors": factors - ONE - 1}, "from 0 to 100"),
        ({"factors": factors * 101}, "from 0 to 100"),
        ({"boxes": places}, r"boxes: expected int64 of shape \(rows, 4\)"),
    ]:
        of = {"source": good, "out": out, "index": index, "places": places}
        of |= {"parts": None, "factors": None, "boxes": None, **wrong}
        with pytest.raises(ValueError, match=words):
            augment._c.change(*of.values(), 32)
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match=f"index: {wrong}, but the source has 2 rows"):
            augment._c.change(good, out, index * 0 + wrong, places, None, None, None, 32)
    for channels, words in [(1, "gray images saturated by 1"), (4, "1 or 3 bytes")]:
        made = np.zeros((2, 4, 5, channels), np.uint8)
        with pytest.raises(ValueError, match=words):
            change_images(images(2, 4, 5, channels), made, places, factors=factors + 1)
    assert not out.any()
    with pytest.raises(ValueError, match="C-contiguous"):
        change_images(good[:, :, ::-1], out, places)
    with pytest.raises(ValueError, match="the source's 1 rows, found 2"):
        change_images(good[:1], out, places)
    fixed = out.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="can be written"):
        change_images(good, fixed, places)
