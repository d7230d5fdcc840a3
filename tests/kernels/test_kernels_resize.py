"""Linear resizing: close to the exact result and to OpenCV's, with and without vectors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flatout.kernels import resize
from flatout.kernels.resize import resize_linear

_LENGTHS = st.integers(1, 70)
_CHANNELS = st.sampled_from([1, 3, 1, 3, 2, 4, 5])


@st.composite
def _cases(draw):
    """An image that is a cut of a larger one, and a size; often a little smaller than the image."""
    height, width, channels = draw(_LENGTHS), draw(_LENGTHS), draw(_CHANNELS)
    close = st.floats(1.0, 1.3)
    size = tuple(
        draw(_LENGTHS | close.map(lambda by, length=length: max(1, int(length / by))))
        for length in (height, width)
    )
    top, left, right = draw(st.tuples(*[st.integers(0, 3)] * 3))
    seed = draw(st.integers(0, 2**32 - 1))
    whole = np.random.default_rng(seed).integers(
        0, 256, (top + height, left + width + right, channels), np.uint8
    )
    if draw(st.booleans()):
        whole[:] = np.where(whole > 127, 255, 0)
    return whole[top:, left : left + width], size


def _resized(image, size, way="vectors"):
    """With vectors where the processor has them, or without."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "plain":
            patch.setattr(resize, "_values", lambda *sizes: b"")
        # Something lies beside the rows, and is to stay.
        around = np.full((size[0] + 2, size[1] + 3, image.shape[2]), 77, np.uint8)
        place = around[1:-1, 1:-2]
        resize_linear(image, place)
    result = place.copy()
    place[:] = 77
    assert (around == 77).all()
    return result


@settings(deadline=None, max_examples=300)
@given(_cases())
def test_vectors_give_the_same_bytes(case):
    np.testing.assert_array_equal(_resized(*case, "vectors"), _resized(*case, "plain"))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("found", "size"),
    [
        ((248, 256), (224, 224)),
        ((225, 269), (224, 225)),
        ((100, 120), (300, 1000)),
        ((700, 900), (31, 45)),
        ((1, 400), (1, 333)),
        ((400, 1), (333, 1)),
        ((1, 1), (5, 40)),
    ],
)
def test_larger_images_too(found, size, channels):
    image = np.random.default_rng(1).integers(0, 256, (*found, channels), np.uint8)
    found = _resized(image, size, "vectors")
    np.testing.assert_array_equal(found, _resized(image, size, "plain"))
    assert abs(found.astype(np.int64) - np.rint(_exact(image, size))).max() <= 1


def _exact(image, size):
    """The definition, in float64."""
    result = image.astype(np.float64)
    for axis, (length, wanted) in enumerate(zip(image.shape[:2], size, strict=True)):
        at = ((np.arange(wanted) + 0.5) * length / wanted - 0.5).clip(0, length - 1)
        first = at.astype(np.int64)
        shape = [1, 1, 1]
        shape[axis] = wanted
        share = (at - first).reshape(shape)
        following = np.minimum(first + 1, length - 1)
        result = result.take(first, axis) * (1 - share) + result.take(following, axis) * share
    return result


@settings(deadline=None)
@given(_cases())
@example((np.full((50, 60, 3), 255, np.uint8), (45, 51)))
def test_at_most_one_off_the_exact_result(case):
    off = _resized(*case).astype(np.int64) - np.rint(_exact(*case))
    assert abs(off).max() <= 1


@settings(deadline=None)
@given(_cases())
def test_the_same_size_changes_nothing(case):
    image, _ = case
    np.testing.assert_array_equal(_resized(image, image.shape[:2]), image)


@settings(deadline=None)
@given(_cases())
def test_at_most_one_off_opencv(case):
    cv2 = pytest.importorskip("cv2")
    image, size = case
    theirs = cv2.resize(
        np.ascontiguousarray(image), size[::-1], interpolation=cv2.INTER_LINEAR
    ).reshape(*size, -1)
    assert abs(_resized(image, size).astype(np.int64) - theirs).max() <= 1


def test_threads_resize_into_one_batch():
    random = np.random.default_rng(2)
    shapes = [(int(h), int(w), 3) for h, w in random.integers(40, 130, (200, 2))]
    images = [random.integers(0, 256, shape, np.uint8) for shape in shapes]
    batch = np.empty((200, 48, 50, 3), np.uint8)
    resize._values.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(resize_linear, images, batch))
    expected = np.stack([_resized(image, (48, 50), "plain") for image in images])
    np.testing.assert_array_equal(batch, expected)


def test_what_cannot_be_written_can_be_read():
    image = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    image.flags.writeable = False
    assert _resized(image, (4, 5)).tobytes() == image.tobytes()


_IMAGE = np.zeros((6, 8, 3), np.uint8)
_OUT = np.zeros((5, 7, 3), np.uint8)
_FROZEN = np.zeros((5, 7, 3), np.uint8)
_FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("source", "out", "words"),
    [
        (_IMAGE[..., 0], _OUT, r"source: expected .* found uint8 of shape \(6, 8\)"),
        (_IMAGE.astype(np.int8), _OUT, "source: .* found int8"),
        (_IMAGE[:0], _OUT, "source: .* none of them 0"),
        (_IMAGE[:, ::2], _OUT, "source: expected contiguous rows"),
        (_IMAGE[::-1], _OUT, "source: .* ascending order"),
        (_IMAGE[..., ::-1], _OUT, "source: expected contiguous rows"),
        (np.broadcast_to(_IMAGE[0], _IMAGE.shape), _OUT, "source: expected contiguous rows"),
        (_IMAGE, _OUT.astype(np.float32), "out: .* found float32"),
        (_IMAGE, _OUT[:, :, :2], "out: expected contiguous rows"),
        (_IMAGE, _OUT.transpose(1, 0, 2), "out: expected contiguous rows"),
        (_IMAGE, np.zeros((5, 7, 1), np.uint8), "out: expected the source's 3 channels, found 1"),
        (_IMAGE, _FROZEN, "out: expected memory that can be written"),
        (_IMAGE, _IMAGE[1:4], "shares memory"),
    ],
)
def test_wrong_arrays_are_refused(source, out, words):
    with pytest.raises(ValueError, match=words):
        resize_linear(source, out)
