"""The C extension and its numpy fallback: the same bytes, the same refusals, never a crash."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_threads import repeated_beside

from flatout.kernels import available, gather, gather_rows

if gather._c is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

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


def _both(function):
    """What C and numpy give for the same call."""
    results = []
    for use_c in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gather, "_use_c", use_c)
            assert available() is use_c
            results.append(function())
    return results


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
def test_both_copy_the_bytes_of_the_rows(case):
    source, index = case
    fast, slow = _both(lambda: gather_rows(source, index))
    assert fast.dtype == slow.dtype == source.dtype
    assert fast.shape == slow.shape == (len(index), *source.shape[1:])
    # Bytes, not values: padding inside a record counts too.
    width = source.nbytes // max(1, len(source))
    expected = b"".join(_raw(source)[i * width : (i + 1) * width] for i in index.tolist())
    assert _raw(fast) == _raw(slow) == expected


_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(_source_and_index(st.just(np.dtype(np.uint8))), _FLOATS | st.none(), _FLOATS)
def test_scaling_rounds_twice_as_numpy_does(case, scale, shift):
    source, index = case
    fast, slow = _both(lambda: gather_rows(source, index, scale=scale, shift=shift))
    factor = np.float32(1 if scale is None else scale)
    with np.errstate(over="ignore"):
        expected = source[index].astype(np.float32) * factor + np.float32(shift)
    assert fast.dtype == slow.dtype == np.float32
    assert fast.tobytes() == slow.tobytes() == expected.tobytes()


def test_scaling_does_not_fuse_multiply_and_add():
    # Found by search: here a fused multiply-add would round otherwise than the two steps.
    pixels = np.arange(256, dtype=np.uint8).reshape(256, 1)
    scale, shift = np.float32(1 / 255), np.float32(-0.1307)
    fused = (pixels.astype(np.float64) * np.float64(scale) + np.float64(shift)).astype(np.float32)
    twice = pixels.astype(np.float32) * scale + shift
    assert (fused != twice).any()
    for result in _both(
        lambda: gather_rows(pixels, np.arange(256), scale=float(scale), shift=float(shift))
    ):
        assert result.tobytes() == twice.tobytes()


def test_rows_go_into_the_given_array():
    source = np.arange(12, dtype=np.int16).reshape(4, 3)
    index = np.array([3, 0, 3])
    out = np.full((3, 3), -1, np.int16)
    assert gather_rows(source, index, out) is out
    assert (out == source[index]).all()


@settings(deadline=None)
@given(st.integers(0, 6), st.one_of(st.integers(-(2**63), -1), st.integers(5, 2**63 - 1)))
def test_a_bad_index_is_named_and_nothing_is_written(position, value):
    source = np.arange(10, dtype=np.uint8).reshape(5, 2)
    index = np.zeros(7, np.int64)
    index[position] = value
    for scale in (None, 0.5):
        out = np.full((7, 2), 9, np.uint8 if scale is None else np.float32)
        for use_c in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gather, "_use_c", use_c)
                with pytest.raises(IndexError) as error:
                    gather_rows(source, index, out, scale=scale)
            assert f"index[{position}] is {value}, but the source has 5 rows" in str(error.value)
            assert (out == 9).all()


def test_no_rows_means_every_index_is_bad():
    empty = np.empty((0, 3), np.float32)
    for result in _both(lambda: gather_rows(empty, np.empty(0, np.int64))):
        assert result.shape == (0, 3)
    with pytest.raises(IndexError, match="0 rows"):
        gather_rows(empty, np.zeros(1, np.int64))


_SOURCE = np.arange(24, dtype=np.uint8).reshape(4, 6)
_INDEX = np.array([0, 1], np.int64)


@pytest.mark.parametrize("use_c", [True, False])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source": _SOURCE[:, ::2]}, "C-contiguous"),
        ({"source": np.asfortranarray(_SOURCE)}, "C-contiguous"),
        ({"source": np.array(7)}, "array of rows"),
        ({"source": np.array(["a", None], object)}, "Python objects"),
        ({"source": _SOURCE.astype(np.int8), "scale": 1.0}, "wants uint8"),
        ({"index": np.array([0, 1], np.int32)}, "int64"),
        ({"index": np.array([0, 1], ">i8")}, "int64"),
        ({"index": np.array([[0, 1]])}, "one dimension"),
        ({"index": np.arange(4)[::2]}, "C-contiguous"),
        ({"out": np.empty((3, 6), np.uint8)}, r"expected uint8 of shape \(2, 6\)"),
        ({"out": np.empty((2, 6), np.int8)}, "found int8"),
        ({"out": np.empty((2, 6), np.uint8), "scale": 1.0}, "expected float32"),
        ({"out": np.empty((2, 12), np.uint8)[:, ::2]}, "C-contiguous"),
        ({"out": _SOURCE[2:]}, "shares memory"),
        ({"scale": float("nan")}, "scale: expected a finite"),
        ({"scale": 1.0, "shift": float("inf")}, "shift: expected a finite"),
        ({"scale": 1e39}, "1e\\+39"),
    ],
)
def test_wrong_arrays_are_refused(arguments, words, use_c, monkeypatch):
    monkeypatch.setattr(gather, "_use_c", use_c)
    with pytest.raises(ValueError, match=words):
        gather_rows(**({"source": _SOURCE, "index": _INDEX} | arguments))


def test_memory_that_cannot_be_written_is_refused():
    out = np.empty((2, 6), np.uint8)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="can be written"):
        gather_rows(_SOURCE, _INDEX, out)


def _unaligned(dtype, count):
    return np.empty(count * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype)


@pytest.mark.parametrize(
    ("source", "index", "out", "error"),
    [
        (3, _INDEX, bytearray(12), TypeError),
        (_SOURCE, _INDEX, bytes(12), ValueError),
        (_SOURCE, _INDEX, bytearray(11), ValueError),
        (_SOURCE, _INDEX, bytearray(13), ValueError),
        (_SOURCE, b"\0" * 16, bytearray(12), ValueError),
        (_SOURCE, _INDEX.astype(np.float64), bytearray(12), ValueError),
        (_SOURCE, _INDEX.astype(np.uint64), bytearray(12), ValueError),
        (_SOURCE, _unaligned(np.int64, 2), bytearray(12), ValueError),
        (_SOURCE.T, _INDEX, bytearray(8), ValueError),
        (np.array(7, np.uint8), _INDEX, bytearray(2), ValueError),
        (np.array([None, "a"], object), _INDEX, bytearray(16), ValueError),
        (np.zeros(4, np.int64), _INDEX, np.array([None, "a"], object), ValueError),
        (_SOURCE, _INDEX, _SOURCE[:2], ValueError),
        (_SOURCE, np.array([4]), bytearray(6), IndexError),
        (b"", np.array([0]), bytearray(0), IndexError),
    ],
)
def test_the_extension_alone_refuses_wrong_buffers(source, index, out, error):
    with pytest.raises(error):
        gather._c.gather(source, index, out)


@pytest.mark.parametrize(
    ("source", "out", "scale"),
    [
        (_SOURCE.view(np.int8), np.empty(12, np.float32), 1.0),
        (_SOURCE, np.empty(12, np.int32), 1.0),
        (_SOURCE, np.empty(6, np.float64), 1.0),
        (_SOURCE, _unaligned(np.float32, 12), 1.0),
        (_SOURCE, np.empty(11, np.float32), 1.0),
        (_SOURCE, np.empty(12, np.float32), float("inf")),
        (_SOURCE, np.empty(12, np.float32), 1e300),
    ],
)
def test_the_extension_alone_refuses_wrong_scaling(source, out, scale):
    with pytest.raises(ValueError, match=r"scal|out|expected"):
        gather._c.gather_scaled(source, _INDEX, out, scale, 0.0)


def test_the_extension_takes_any_buffer():
    out = bytearray(6)
    index = np.array([2, 0, 1])
    gather._c.gather(memoryview(b"aabbcc").cast("B", (3, 2)), index, out)
    assert out == b"ccaabb"


def test_an_index_that_another_thread_spoils_never_reads_outside():
    source = np.arange(4096, dtype=np.uint8).reshape(512, 8)
    index = np.zeros(200_000, np.int64)

    def spoil():
        index[150_000:] = 1 << 60
        index[150_000:] = 0

    refused = 0
    with repeated_beside(spoil):
        for _ in range(200):
            try:
                gather_rows(source, index)
            except IndexError:
                refused += 1
    assert refused > 0


def _run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


_GATHER_TWICE = """
import sys
{prelude}
import numpy as np
from flatout.kernels import available, gather_rows
for _ in range(2):
    rows = gather_rows(np.arange(3.0), np.array([2, 1]))
print(available(), rows.tolist())
"""


def test_without_the_extension_the_fallback_serves_and_says_so_once():
    absent = "sys.modules['flatout.kernels._gather'] = None"
    done = _run(_GATHER_TWICE.format(prelude=absent), PYTHONWARNINGS="always")
    assert done.stdout == "False [2.0, 1.0]\n"
    assert done.stderr.count("RuntimeWarning: flatout's C extension is absent") == 1
    assert "install a C compiler" in done.stderr


def test_the_environment_can_ask_for_the_fallback_without_a_warning():
    done = _run(_GATHER_TWICE.format(prelude=""), PYTHONWARNINGS="always", FLATOUT_KERNELS="numpy")
    assert done.stdout == "False [2.0, 1.0]\n"
    assert done.stderr == ""
