"""Parts, orientations and colors of images: the same bytes in C and numpy, and as torch has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import augment
from flatout.kernels.augment import ONE, adjust, arrange

if augment._c is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

WAYS = (True, False)
_LENGTHS = st.integers(1, 24)


def images(rows, height, width, channels, seed=0, dtype=np.uint8):
    values = np.random.default_rng(seed).integers(0, 256, (rows, height, width, channels))
    return values.astype(dtype)


def arranged(source, size, places, use_c=True):
    """In the middle of memory that is to stay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "_use_c", use_c)
        whole = np.full((len(source) + 2, *size, source.shape[3]), 77, source.dtype)
        arrange(source, whole[1:-1], np.asarray(places, np.int64))
    assert (whole[[0, -1]] == 77).all()
    return whole[1:-1]


def adjusted(pixels, factors, use_c=True):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "_use_c", use_c)
        made = pixels.copy()
        adjust(made, np.asarray(factors, np.int64))
    return made


@settings(deadline=None, max_examples=200)
@given(
    _LENGTHS, _LENGTHS, st.sampled_from([1, 2, 3, 3, 4]), st.sampled_from([np.uint8, np.float32]),
    st.booleans(), st.data(),
)  # fmt: skip
def test_parts_in_c_are_those_of_numpy(height, width, channels, dtype, square, data):
    source = images(2, height, width, channels, dtype=dtype)
    size = data.draw(st.tuples(_LENGTHS, _LENGTHS))
    size = (size[0], size[0]) if square else size
    place = st.tuples(st.integers(-30, 30), st.integers(-30, 30), st.sampled_from(range(8)))
    places = data.draw(st.tuples(place, place))
    if not square:
        places = [(top, left, orientation & ~1) for top, left, orientation in places]
    ours, theirs = (arranged(source, size, places, way) for way in WAYS)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("width", [1, 5, 6, 7, 11, 32, 33, 224])
def test_orientations_are_torchs(width):
    source = images(8, width, width, 3)
    found = arranged(source, (width, width), [(0, 0, orientation) for orientation in range(8)])
    for orientation, image in enumerate(torch.from_numpy(source)):
        mirrored = image.flip(1) if orientation & 4 else image
        assert torch.equal(torch.from_numpy(found[orientation]), mirrored.rot90(orientation & 3))


@settings(deadline=None, max_examples=100)
@given(
    _LENGTHS, _LENGTHS, st.sampled_from([1, 3]), st.integers(0, 2**32 - 1),
    st.tuples(*[st.floats(0, 3) | st.sampled_from([0.0, 1.0, 100.0])] * 3),
)  # fmt: skip
def test_colors_in_c_are_those_of_numpy_and_about_torchvisions(height, width, channels, seed, by):
    pixels = images(1, height, width, channels, seed)
    by = (*by[:2], by[2] if channels == 3 else 1.0)
    factors = [[round(factor * ONE) for factor in by]]
    ours, theirs = (adjusted(pixels, factors, way) for way in WAYS)
    assert np.array_equal(ours, theirs)
    for at in range(3):  # each alone: one that follows enlarges what another has rounded
        alone = [ONE] * 3
        alone[at] = factors[0][at]
        exact = by_torchvision(pixels[0], at, alone[at] / ONE)
        # A gray that is rounded to the other side counts as often as it is taken off.
        most = 1 + (abs(1 - alone[at] / ONE) if at else 0)
        assert np.abs(adjusted(pixels, [alone])[0].astype(int) - exact).max(initial=0) <= most


def by_torchvision(image, at, factor):
    """What torchvision's adjust_brightness, adjust_contrast and adjust_saturation compute."""
    image = torch.from_numpy(image).float()
    gray = image
    if image.shape[2] == 3:
        gray = (0.2989 * image[..., :1] + 0.587 * image[..., 1:2] + 0.114 * image[..., 2:]).floor()
    other = (torch.zeros(()), gray.mean(), gray)[at]
    return (factor * image + (1 - factor) * other).clamp(0, 255).to(torch.uint8).numpy().astype(int)


def test_bad_arrays_are_errors_and_never_a_crash():
    good, out = images(2, 4, 5, 3), np.zeros((2, 3, 3, 3), np.uint8)
    places = np.zeros((2, 3), np.int64)
    for arguments, words in [
        ((good[:1], out, places), "the same rows"),
        ((good[..., :2].copy(), out, places), "the same rows and bytes"),
        ((good, good[:, :3, :3].copy(), places[:1]), r"int64 of shape \(rows, 3\)"),
        ((good, out, places.astype(np.int32)), "int64"),
        ((good, out, places + np.array([0, 0, 8])), "0 to 7"),
        ((good, out, places - np.array([0, 0, 1])), "0 to 7"),
        ((good, out, places + np.array([2**40, 0, 0])), r"within 2\^31"),
        ((good, good.reshape(2, 5, 4, 3), places), "shares memory"),
        ((good, np.zeros((2, 3, 4, 3), np.uint8), places + np.array([0, 0, 1])), "only squares"),
    ]:
        with pytest.raises(ValueError, match=words):
            augment._c.arrange(*arguments)
    with pytest.raises(ValueError, match="C-contiguous"):
        arrange(good[:, :, ::-1], out, places)
    fixed = out.copy()
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="can be written"):
        arrange(good, fixed, places)
    factors = np.full((2, 3), ONE)
    for pixels, wrong, words in [
        (good.astype(np.int8), factors, "pixels: expected uint8"),
        (images(2, 4, 5, 4), factors, "1 or 3"),
        (good, factors[:1], r"int64 of shape \(rows, 3\)"),
        (good, factors - ONE - 1, "from 0 to 100"),
        (good, factors * 101, "from 0 to 100"),
        (images(2, 4, 5, 1), factors + 1, "gray images saturated by 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            augment._c.adjust(pixels, wrong)
