"""Rows by index: as numpy takes them, with and without the C extension."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flatout.kernels import gather, gather_rows

_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(min_len=1),
    st.just(np.dtype([("id", "<i2"), ("value", "<f8")], align=True)),
)


@pytest.fixture(params=["c", "numpy"], autouse=True)
def _way(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(gather, "_c", None)


@st.composite
def _source_and_index(draw, dtypes=_DTYPES):
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
    size = int(np.prod(shape))
    dtype = draw(dtypes)
    raw = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    source = np.frombuffer(raw, np.uint8).view(dtype) if size else np.empty(0, dtype)
    rows = st.integers(0, shape[0] - 1) if shape[0] else st.nothing()
    index = draw(st.lists(rows, max_size=8)) if shape[0] else []
    return source.reshape(shape), np.array(index, np.int64)


def _raw(array):
    return array.reshape(-1).view(np.uint8).tobytes() if array.size else b""


@settings(deadline=None)
@given(_source_and_index())
def test_the_values_of_the_rows_are_copied(case):
    source, index = case
    found = gather_rows(source, index)
    assert found.dtype == source.dtype
    assert found.shape == (len(index), *source.shape[1:])
    if source.dtype.names is None:
        assert _raw(found) == _raw(source[index])
    else:
        for name in source.dtype.names:
            assert found[name].tobytes() == source[name][index].tobytes()


_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(_source_and_index(st.just(np.dtype(np.uint8))), _FLOATS | st.none(), _FLOATS)
def test_scaling_rounds_twice_as_numpy_does(case, scale, shift):
    source, index = case
    found = gather_rows(source, index, scale=scale, shift=shift)
    factor = np.float32(1 if scale is None else scale)
    with np.errstate(over="ignore"):
        expected = source[index].astype(np.float32) * factor + np.float32(shift)
    assert found.dtype == np.float32
    assert found.tobytes() == expected.tobytes()


def test_scaling_does_not_fuse_multiply_and_add():
    # Found by search: here a fused multiply-add would round otherwise than the two steps.
    pixels = np.arange(256, dtype=np.uint8).reshape(256, 1)
    scale, shift = np.float32(1 / 255), np.float32(-0.1307)
    fused = (pixels.astype(np.float64) * np.float64(scale) + np.float64(shift)).astype(np.float32)
    twice = pixels.astype(np.float32) * scale + shift
    assert (fused != twice).any()
    found = gather_rows(pixels, np.arange(256), scale=float(scale), shift=float(shift))
    assert found.tobytes() == twice.tobytes()


def test_rows_go_into_the_given_array():
    source = np.arange(12, dtype=np.int16).reshape(4, 3)
    index = np.array([3, 0, 3])
    out = np.full((3, 3), -1, np.int16)
    assert gather_rows(source, index, out) is out
    assert (out == source[index]).all()


_SOURCE = np.arange(24, dtype=np.uint8).reshape(4, 6)
_INDEX = np.array([0, 1], np.int64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"out": np.empty((3, 6), np.uint8)}, r"expected uint8 of shape \(2, 6\)"),
        ({"out": np.empty((2, 6), np.int8)}, "found int8"),
        ({"out": np.empty((2, 6), np.uint8), "scale": 1.0}, "expected float32"),
        ({"scale": float("nan")}, "scale: expected a finite"),
        ({"scale": 1.0, "shift": float("inf")}, "shift: expected a finite"),
        ({"scale": 1e39}, "1e\\+39"),
    ],
)
def test_wrong_arrays_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        gather_rows(**({"source": _SOURCE, "index": _INDEX} | arguments))


def _unaligned(dtype, count):
    return np.empty(count * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype)


@pytest.mark.parametrize(
    ("source", "index", "out", "error"),
    [
        (3, _INDEX, bytearray(12), TypeError),
        (_SOURCE, _INDEX, bytes(12), ValueError),
        (_SOURCE, _INDEX, bytearray(11), ValueError),
        (_SOURCE, _INDEX.astype(np.float64), bytearray(12), ValueError),
        (_SOURCE, _unaligned(np.int64, 2), bytearray(12), ValueError),
        (_SOURCE.T, _INDEX, bytearray(8), ValueError),
        (np.array(7, np.uint8), _INDEX, bytearray(2), ValueError),
        (np.array([None, "a"], object), _INDEX, bytearray(16), ValueError),
        (_SOURCE, np.array([4]), bytearray(6), IndexError),
    ],
)
def test_the_extension_refuses_wrong_buffers(source, index, out, error):
    if gather.available():
        with pytest.raises(error):
            gather._c.gather(source, index, out)


@settings(deadline=None)
@given(st.integers(0, 6), st.one_of(st.integers(-(2**63), -1), st.integers(5, 2**63 - 1)))
def test_a_bad_index_is_named_and_nothing_is_written(position, value):
    if not gather.available():
        return  # numpy counts negative numbers from the end
    source = np.arange(10, dtype=np.uint8).reshape(5, 2)
    index = np.zeros(7, np.int64)
    index[position] = value
    for scale in (None, 0.5):
        out = np.full((7, 2), 9, np.uint8 if scale is None else np.float32)
        with pytest.raises(IndexError) as error:
            gather_rows(source, index, out, scale=scale)
        assert f"index[{position}] is {value}, but the source has 5 rows" in str(error.value)
        assert (out == 9).all()
