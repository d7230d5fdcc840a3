"""Rows of LibSVM text: as scikit-learn and Python read them, and what is wrong with bad rows."""

from __future__ import annotations

import io
import mmap
import os
import subprocess
import sys
from decimal import Decimal, localcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_threads import runs_beside
from sklearn.datasets import load_svmlight_file

from flatout.kernels import libsvm, lines
from flatout.kernels.libsvm import NO_LIMIT, Bad

_AGARICUS = Path(__file__).parents[3] / "shared/data/agaricus"

# The processor's best, and what is left without AVX2.
_WAYS = [False, True]
# The fast way reads so much behind a row.
_REST = b"\n" + b"1:1 " * 16


class Read:
    """Outputs that start as garbage, and what a function of the module made of them."""

    def __init__(self, way, function, text, ranges, arrays, **settings):
        starts, ends = (np.array(ranges, np.int64).reshape(-1, 2)[:, i].copy() for i in (0, 1))
        self.arrays = arrays | {
            "status": np.full(len(starts), 77, np.uint8),
            "at": np.full(len(starts), -77, np.int64),
        }
        places = [settings.pop("offsets")] if "offsets" in settings else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(libsvm, "_is_plain", way)
            self.result = function(text, starts, ends, *places, **self.arrays, **settings)

    def __getattr__(self, name):
        return self.arrays[name]

    @property
    def bytes(self):
        return {k: None if v is None else v.tobytes() for k, v in self.arrays.items()}

    @property
    def codes(self):
        return [Bad(code) if code else None for code in self.status.tolist()]


def _in_all_ways(function, text, ranges, make_arrays, **settings):
    reads = [Read(way, function, text, ranges, make_arrays(), **settings) for way in _WAYS]
    for other in reads[1:]:
        assert other.result == reads[0].result
        assert other.bytes == reads[0].bytes
    return reads[0]


def _survey(text, ranges, **settings):
    def arrays():
        return {
            "lengths": np.full(len(ranges), 77, np.int32),
            "labels": np.full(len(ranges), 77, np.float64),
            "qid": np.full(len(ranges), 77, np.int64),
        }

    return _in_all_ways(libsvm.survey, text, ranges, arrays, **settings)


def _parse(text, ranges, offsets, dtypes=("f4", "i8", "f4"), qid=True, base=0, limit=NO_LIMIT):
    offsets = np.array(offsets, np.int64)

    def arrays():
        return {
            "labels": np.full(len(ranges), 77, dtypes[0]),
            "ids": np.full(int(offsets[-1]), 77, dtypes[1]),
            "values": np.full(int(offsets[-1]), 77, dtypes[2]),
            "qid": np.full(len(ranges), 77, np.int64) if qid else None,
        }

    return _in_all_ways(libsvm.parse, text, ranges, arrays, offsets=offsets, base=base, limit=limit)


def _dense(text, ranges, limit, label="f4", base=0):
    def arrays():
        return {
            "labels": np.full(len(ranges), 77, label),
            "out": np.full((len(ranges), limit), 77, np.float32),
        }

    return _in_all_ways(libsvm.dense, text, ranges, arrays, base=base, limit=limit)


def _ranges(text):
    return list(zip(*(one.tolist() for one in lines.index_lines(text)), strict=True))


def _one(row, width=8, **settings):
    """One row, with and without text around it, which must not matter."""
    alone = _parse(row, [(0, len(row))], [0, width], **settings)
    inside = _parse(b"9 9:9\n" + row + _REST, [(6, 6 + len(row))], [0, width], **settings)
    for name in ("status", "labels", "ids", "values"):
        assert inside.arrays[name].tobytes() == alone.arrays[name].tobytes()
    assert alone.at[0] in (-77, inside.at[0] - 6)
    return alone


# ---- what rows mean ----

_BLANKS = st.sampled_from([" ", " ", " ", "\t", "  ", " \t "])
_ENDS = st.sampled_from(["\n", "\r\n", " \n", "\t\r\n", " # 1:2 qid:3\n", "#\n"])
_FORMATS = st.sampled_from(["%r", "%.6g", "%.17g", "%e", "%+.3f", "%.20f", "%.0f"])
_VALUES = st.one_of(
    st.just(1.0),
    st.integers(-9, 99).map(float),
    st.floats(-1e6, 1e6),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@st.composite
def _texts(draw, label_values=_VALUES):
    """Files that scikit-learn reads: text, base, with qid, highest index."""
    base, has_qid = draw(st.integers(0, 1)), draw(st.booleans())
    blank, end = draw(_BLANKS), draw(_ENDS)
    step = draw(st.sampled_from([1, 3, 1000, 123_456_789]))
    rows, highest = [], base
    for _ in range(draw(st.integers(1, 5))):
        row = draw(_FORMATS) % draw(label_values)
        if has_qid:
            row += f"{draw(_BLANKS)}qid:{draw(st.integers(0, 99))}"
        index = draw(st.integers(base, base + step))
        for value in draw(st.lists(_VALUES, max_size=draw(st.sampled_from([3, 40])))):
            number = "1" if value == 1 else draw(_FORMATS) % value
            row += f"{blank}{index}:{number}"
            highest = max(highest, index)
            index += draw(st.integers(1, step))
        rows.append(row + end)
        if draw(st.integers(0, 9)) == 0:
            rows.append(draw(st.sampled_from(["\n", "# a comment 1:2\n", "  \t\r\n"])))
    text = "".join(rows).encode()
    return text[: -draw(st.integers(0, 1)) or None], base, has_qid, highest


@settings(deadline=None, max_examples=200)
@given(_texts())
def test_rows_are_those_of_scikit_learn(case):
    text, base, has_qid, highest = case
    expected = load_svmlight_file(
        io.BytesIO(text), zero_based=base == 0, query_id=has_qid, n_features=highest - base + 1
    )
    ranges = _ranges(text)
    looked = _survey(text, ranges, base=base)
    assert looked.result == (
        0,
        int(expected[0].indices.min(initial=NO_LIMIT - base)) + base,
        int(expected[0].indices.max(initial=-1 - base)) + base,
    )
    np.testing.assert_array_equal(looked.lengths, np.diff(expected[0].indptr))
    np.testing.assert_array_equal(looked.labels, expected[1])
    np.testing.assert_array_equal(looked.qid, expected[2] if has_qid else -1)
    offsets = np.append(0, np.cumsum(looked.lengths))
    for dtypes in (("f8", "i8", "f8"), ("f4", "i4", "f4")):
        rows = _parse(text, ranges, offsets, dtypes, base=base, limit=highest - base + 1)
        assert rows.result == 0
        np.testing.assert_array_equal(rows.labels, expected[1].astype(dtypes[0]))
        np.testing.assert_array_equal(rows.ids, expected[0].indices)
        np.testing.assert_array_equal(rows.values, expected[0].data.astype(dtypes[2]))
        np.testing.assert_array_equal(rows.qid, looked.qid)
    if highest < 1000:
        vectors = _dense(text, ranges, highest - base + 1, base=base)
        np.testing.assert_array_equal(vectors.out, expected[0].toarray().astype(np.float32))


@settings(deadline=None)
@given(_texts(st.integers(-(2**53) + 1, 2**53 - 1).map(float)), st.integers(0, 3))
def test_rows_are_padded_with_zeros(case, more):
    text, base, _, _ = case
    ranges = _ranges(text)
    looked = _survey(text, ranges)
    width = int(looked.lengths.max(initial=0)) + more
    rows = _parse(text, ranges, np.arange(len(ranges) + 1) * width, base=base)
    assert rows.result == 0
    shape = (len(ranges), width)
    ids, values = rows.ids.reshape(shape), rows.values.reshape(shape)
    ragged = _parse(text, ranges, np.append(0, np.cumsum(looked.lengths)), base=base)
    inside = np.arange(width) < looked.lengths[:, None]
    np.testing.assert_array_equal(ids[inside], ragged.ids)
    np.testing.assert_array_equal(values[inside], ragged.values)
    assert not ids[~inside].any()
    assert not values[~inside].any()


def test_newlines_may_be_part_of_the_range():
    for end in (b"", b"\n", b"\r\n", b"\r", b" \r\n", b"\t# 1:2\r\n", b"#\n"):
        row = _one(b" \t-1.5 2:3 4:0.5" + end)
        assert row.result == 0
        assert (row.labels[0], row.qid[0]) == (-1.5, -1)
        assert row.ids.tolist() == [2, 4, 0, 0, 0, 0, 0, 0]
        assert row.values.tolist() == [3, 0.5, 0, 0, 0, 0, 0, 0]


def test_a_row_may_have_no_pairs():
    for text in (b"3", b"3 ", b"3#1:1", b"3 qid:7", b"3 qid:7 # x"):
        row = _one(text, width=2)
        assert (row.result, row.labels[0]) == (0, 3)
        assert row.qid[0] == (7 if b"qid" in text else -1)
        assert not row.ids.any()


def test_a_long_row_is_read_across_chunks():
    # Tokens of all lengths, so that chunks of 512 bytes end everywhere in them.
    rng = np.random.default_rng(3)
    index = np.cumsum(rng.integers(1, 10 ** rng.integers(1, 8, 5000)))
    values = [f"{value:.{rng.integers(0, 17)}f}" for value in rng.normal(size=5000)]
    row = ("1 " + " ".join(f"{i}:{v}" for i, v in zip(index, values, strict=True))).encode()
    for cut in range(70):
        text = row[: len(row) - 13 * cut].rpartition(b" ")[0] + b" " * (cut % 3)
        found = _parse(text + b"\n" * 64, [(0, len(text))], [0, 5000], ("f4", "i8", "f8"))
        pairs = text.count(b":")
        assert found.result == 0
        assert found.ids[:pairs].tolist() == index[:pairs].tolist()
        assert found.values[:pairs].tolist() == [float(value) for value in values[:pairs]]


@pytest.mark.skipif(not _AGARICUS.is_dir(), reason="../shared/data/agaricus is absent")
@pytest.mark.parametrize("name", ["agaricus_train.libsvm", "agaricus_test.libsvm"])
def test_agaricus(name):
    text = (_AGARICUS / name).read_bytes()
    expected, labels = load_svmlight_file(io.BytesIO(text), n_features=127, zero_based=True)
    ranges = _ranges(text)
    found = _dense(text, ranges, 127, "i8")
    assert found.result == 0
    np.testing.assert_array_equal(found.out, expected.toarray())
    np.testing.assert_array_equal(found.labels, labels)
    assert _survey(text, ranges).result == (0, expected.indices.min(), expected.indices.max())


# ---- numbers ----


def _check_number(number):
    """As Python reads it: as a label, and as a value in both dtypes among others."""
    exact = float(number)
    row = number + b" 1:1 2:" + number + b" 3:0.25"
    wide = _one(row, 3, dtypes=("f8", "i8", "f8"))
    if not np.isfinite(exact):
        assert wide.codes == [Bad.NOT_FINITE]
        assert wide.at[0] == 0
        return
    assert wide.values.tobytes() == np.array([1, exact, 0.25]).tobytes()
    assert wide.labels.tobytes() == np.array([exact]).tobytes()
    with np.errstate(over="ignore"):
        rounded = np.array([1, exact, 0.25]).astype(np.float32)
    narrow = _one(b"0 1:1 2:" + number + b" 3:0.25", 3)
    if np.isfinite(rounded).all():
        assert narrow.values.tobytes() == rounded.tobytes()
    else:
        assert (narrow.codes, narrow.at[0]) == ([Bad.NOT_FINITE], len(b"0 1:1 2:"))


@settings(deadline=None, max_examples=500)
@given(
    st.from_regex(
        rb"[+-]?([0-9]{1,25}(\.[0-9]{0,25})?|\.[0-9]{1,25})([eE][+-]?[0-9]{1,3})?", fullmatch=True
    )
)
@example(b"1e400")
@example(b"-1e-400")
@example(b"0e99999999999999999999")
@example(b"1e-99999999999999999999")
@example(b"340282356779733661637539395458142568447")
@example(b"340282356779733661637539395458142568448")
@example(b"9007199254740993")
@example(b"18446744073709551615")
@example(b"18446744073709551616")
@example(b"9999999999999999999e-27")
@example(b"1000000000000000000e27")
@example(b"2.2250738585072011e-308")
@example(b"5e-324")
@example(b"2.4703282292062327e-324")
@example(b"-0")
@example(b"-0.0")
@example(b"7.")
@example(b"-.5")
@example(b"00000000000000000000000000001.5")
def test_numbers_are_rounded_as_python_does(number):
    _check_number(number)


@settings(deadline=None, max_examples=300)
@given(st.floats(allow_nan=False, allow_infinity=False), _FORMATS)
def test_formatted_numbers_are_rounded_as_python_does(value, form):
    _check_number((form % value).encode())


@settings(deadline=None)
@given(st.floats(1e-300, 1e300), st.sampled_from([b"", b"0", b"1", b"0" * 900 + b"1"]))
def test_numbers_halfway_between_two_doubles(value, last):
    # Up to some 760 digits decide, and those that are cut off still count.
    with localcontext() as context:
        context.prec = 2000
        halfway = (Decimal(value) + Decimal(float(np.nextafter(value, np.inf)))) / 2
        text = f"{halfway:f}".encode()
    _check_number((text if b"." in text else text + b".") + last)


@settings(deadline=None)
@given(
    st.integers(0, 2**70),
    st.sampled_from([0, 1, 700, 1500]),
    st.sampled_from([0, 1, 30, 1500]),
    st.integers(-2000, 2000),
)
def test_any_number_of_zeros(digits, before, behind, power):
    _check_number(b"0" * before + b"%d" % digits + b"0" * behind + b"e%d" % power)
    _check_number(b"0." + b"0" * before + b"%d" % digits + b"0" * behind + b"e%d" % power)


@settings(deadline=None)
@given(st.integers(0, NO_LIMIT - 1), st.integers(0, 30))
def test_any_index_that_fits(index, zeros):
    row = _one(b"1 " + b"0" * zeros + b"%d:2" % index, 1)
    assert (row.result, row.ids.tolist(), row.values.tolist()) == (0, [index], [2])


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**60), 2**60).map(float))
def test_whole_labels(value):
    row = _one(b"%r 1:1" % value, dtypes=("i8", "i8", "f4"))
    if abs(value) < 2**53 and value.is_integer():
        assert (row.result, row.labels.tolist()) == (0, [int(value)])
    else:
        assert (row.codes, row.at[0], row.labels[0]) == ([Bad.NOT_WHOLE], 0, 0)


# ---- bad rows ----

_BAD_ROWS = [
    ("|", Bad.NO_LABEL),
    ("| \t\r\n", Bad.NO_LABEL),
    (" |# 1 2:3", Bad.NO_LABEL),
    ("|1:2 3:4", Bad.NO_LABEL),
    ("|qid:1 3:4", Bad.NO_LABEL),
    ("1|,2 3:4", Bad.MULTI_LABEL),
    ("1|, 3:4", Bad.MULTI_LABEL),
    ("|x 3:4", Bad.LABEL),
    ("+|+1 3:4", Bad.LABEL),
    ("-|", Bad.LABEL),
    (".| 3:4", Bad.LABEL),
    ("1|_0 3:4", Bad.LABEL),
    ("1.5|.5 3:4", Bad.LABEL),
    ("1e| 3:4", Bad.LABEL),
    ("1e+|", Bad.LABEL),
    ("0|x10 3:4", Bad.LABEL),
    ("|\ufeff1 3:4", Bad.LABEL),
    ("1|qid:3", Bad.LABEL),
    ("|nan 3:4", Bad.NOT_FINITE),
    ("|-INF 3:4", Bad.NOT_FINITE),
    ("|+Infinity", Bad.NOT_FINITE),
    ("|nan(1) 3:4", Bad.NOT_FINITE),
    ("|nano 3:4", Bad.LABEL),
    ("|infinit 3:4", Bad.LABEL),
    ("|1e999 3:4", Bad.NOT_FINITE),
    ("|1e39 3:4", Bad.NOT_FINITE),
    ("1 qid:| 3:4", Bad.QID),
    ("1 qid:|-1 3:4", Bad.QID),
    ("1 qid:1|.5 3:4", Bad.QID),
    ("1 qid:|9223372036854775808 3:4", Bad.TOO_LARGE),
    ("1 2:3 |qid:1 3:4", Bad.INDEX),
    ("1 qid:1 |qid:1", Bad.INDEX),
    ("1 |:4", Bad.INDEX),
    ("1 |x:4", Bad.INDEX),
    ("1 |+3:4", Bad.INDEX),
    ("1 3|.0:4", Bad.INDEX),
    ("1 3|x:4", Bad.INDEX),
    ("1 12345678|x:4", Bad.INDEX),
    ("1 |-:4", Bad.INDEX),
    ("1 3:4|\x00 5:6", Bad.VALUE),
    ("1 3:4|\r 5:6", Bad.VALUE),
    ("1 3:4|\v5:6", Bad.VALUE),
    ("1 3:| 5:6", Bad.VALUE),
    ("1 3:|", Bad.VALUE),
    ("1 3:|#", Bad.VALUE),
    ("1 3:|:4", Bad.VALUE),
    ("1 3:4|:5", Bad.VALUE),
    ("1 3:4|,5", Bad.VALUE),
    ("1 3:-| 4:5", Bad.VALUE),
    ("1 3:.| 4:5", Bad.VALUE),
    ("1 3:-.| 4:5", Bad.VALUE),
    ("1 3:-|-1", Bad.VALUE),
    ("1 3:1.2|.3", Bad.VALUE),
    ("1 3:1e5|.3", Bad.VALUE),
    ("1 3:1e-|x", Bad.VALUE),
    ("1 3:0.12345678901234567|a 4:5", Bad.VALUE),
    ("1 3:|NaN 4:5", Bad.NOT_FINITE),
    ("1 3:|-inf", Bad.NOT_FINITE),
    ("1 3:|1e39", Bad.NOT_FINITE),
    ("1 3:|-1e400 4:5", Bad.NOT_FINITE),
    ("1 3|", Bad.NO_COLON),
    ("1 3| :4", Bad.NO_COLON),
    ("1 3:4 5|\t6:7", Bad.NO_COLON),
    ("1 3:4 5|#", Bad.NO_COLON),
    ("1 |9223372036854775808:4", Bad.TOO_LARGE),
    ("1 |99999999999999999999999999:4", Bad.TOO_LARGE),
    ("1 3:4 |3:5", Bad.UNORDERED),
    ("1 3:4 5:1 7:1 9:1 |8:1", Bad.UNORDERED),
    ("1 3:4 |2:5 x", Bad.UNORDERED),
    ("1 |-3:4", Bad.BELOW_BASE),
    ("1 |0:4", Bad.BELOW_BASE),
    ("1 5:1 |1001:4", Bad.BEYOND_LIMIT),
    ("1 |1001:4 x", Bad.BEYOND_LIMIT),
    ("1 1:1 2:1 3:1 4:1 5:1 6:1 7:1 8:1 |9:1", Bad.TOO_MANY),
    ("1 1:1 2:1 3:1 4:1 5:1 6:1 7:1 8:1 |9:1 10:1 # x", Bad.TOO_MANY),
    ("1 3:4|\n5 6:7", Bad.TWO_LINES),
    ("1 3:4 |\n5 6:7", Bad.TWO_LINES),
    ("1|\n2:3", Bad.TWO_LINES),
    ("|\n1 2:3", Bad.TWO_LINES),
    ("1 3:4 # 5|\n5 6:7", Bad.TWO_LINES),
]


@pytest.mark.parametrize(("marked", "bad"), _BAD_ROWS)
def test_what_is_wrong_is_told_with_its_byte(marked, bad):
    at = marked.encode().index(b"|")
    row = marked.encode().replace(b"|", b"", 1)
    found = _one(row, base=1, limit=1000)
    assert (found.codes, found.at.tolist()) == ([bad], [at])
    # Whatever was read before must not stay.
    assert not found.labels.any()
    assert not found.ids.any()
    assert not found.values.any()
    assert not found.qid.any()
    # A good row before and behind: `at` counts from the buffer's begin, and they stay good.
    text = b"1 1:2\n" + row + b"\n" * 80 + b"2 3:4"
    ranges = [(0, 5), (6, 6 + len(row)), (len(text) - 5, len(text))]
    three = _parse(text, ranges, [0, 8, 16, 24], base=1, limit=1000)
    assert three.result == 1
    assert three.codes == [None, bad, None]
    assert three.at.tolist() == [-77, 6 + at, -77]
    assert three.ids[[0, 16]].tolist() == [0, 2]
    if bad != Bad.TOO_MANY:
        vectors = _dense(text, ranges, 1000, base=1)
        assert vectors.codes == three.codes
        assert not vectors.out[1].any()
        assert vectors.out[2, 2] == 4
    looked = _survey(text, ranges, base=1, limit=1000, width=8, label_as="float32")
    assert looked.codes == three.codes
    assert looked.at.tolist() == three.at.tolist()
    assert looked.result == (1, 1, 3)
    assert looked.lengths.tolist() == [1, 0, 1]
    assert looked.labels.tolist() == [1, 0, 2]
    assert looked.qid.tolist() == [-1, 0, -1]


def test_every_code_is_tested_and_says_what_it_means():
    tested = {bad for _, bad in _BAD_ROWS} | {Bad.OUTSIDE, Bad.NOT_WHOLE}
    assert tested == {*Bad}
    for bad in Bad:
        assert bad.words.startswith("expected ")
        assert "found" in bad.words


@pytest.mark.parametrize(
    ("start", "end"),
    [(-1, 5), (0, 6), (6, 6), (5, 4), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63)), (2**62, 2**62)],
)
def test_ranges_outside_of_the_buffer(start, end):
    text = b"1 2:3"
    ranges = [(0, 5), (start, end), (0, 5)]
    for found in (
        _parse(text, ranges, [0, 2, 4, 6]),
        _dense(text, ranges, 3),
        _survey(text, ranges),
    ):
        assert found.codes == [None, Bad.OUTSIDE, None]
        assert found.at.tolist() == [-77, start, -77]
    assert _parse(b"", [(0, 0), (0, 1)], [0, 0, 0]).codes == [Bad.NO_LABEL, Bad.OUTSIDE]


def test_int32_ids_end_where_int32_does():
    assert _one(b"1 2147483647:1", dtypes=("f4", "i4", "f4")).ids[0] == 2**31 - 1
    assert _one(b"1 2147483648:1", dtypes=("f4", "i4", "f4"), base=1).ids[0] == 2**31 - 1
    found = _one(b"1 2147483648:1", dtypes=("f4", "i4", "f4"))
    assert (found.codes, found.at[0]) == ([Bad.BEYOND_LIMIT], 2)


_TOKENS = st.sampled_from(
    [
        *(b" ", b" ", b"\t", b"#", b",", b"\n", b"\r\n", b"\0", b"\xff", b"x", b"nan", b"inf"),
        *(b":", b":1", b"1", b"2", b"37", b"12345678", b"123456789", b"0.5", b"-", b"+", b"qid:"),
        *(b".", b"e", b"E-5", b"9223372036854775807", b"9223372036854775808", b"1 1:1 2:1 3:1"),
        b"0.1234567890123456789",
    ]
)
_NOISE = st.one_of(
    st.lists(_TOKENS, max_size=60).map(b"".join),
    st.binary(max_size=200),
    _texts().map(lambda case: case[0]),
)


@st.composite
def _damaged(draw):
    """Text, good or not, with some bytes changed; and ranges that are mostly its lines."""
    text = bytearray(draw(_NOISE))
    for _ in range(draw(st.integers(0, 3)) if text else 0):
        text[draw(st.integers(0, len(text) - 1))] = draw(st.sampled_from(b" :#\n\r\t.-1e\0\x80"))
    ranges = _ranges(bytes(text))
    numbers = st.integers(-3, len(text) + 3)
    ranges += draw(st.lists(st.tuples(numbers, numbers), max_size=3))
    return bytes(text), ranges


@settings(deadline=None, max_examples=400)
@given(
    _damaged(),
    st.integers(0, 1),
    st.sampled_from([0, 1, 5, 1000, 2**31, NO_LIMIT]),
    st.sampled_from([0, 1, 3, 50]),
    st.sampled_from(["f4", "f8", "i8"]),
    st.sampled_from(["i4", "i8"]),
    st.sampled_from(["f4", "f8"]),
    st.booleans(),
)
def test_all_ways_agree_on_any_bytes(case, base, limit, width, label, index, value, qid):
    text, ranges = case
    offsets = np.arange(len(ranges) + 1) * width
    rows = _parse(text, ranges, offsets, (label, index, value), qid, base, limit)
    if index == "i4":
        limit = min(limit, 2**31)
    # A survey by the same rules judges alike.
    looked = _survey(text, ranges, base=base, limit=limit, width=width, label_as=label)
    if value == "f4":
        assert looked.codes == rows.codes
        assert looked.at.tolist() == rows.at.tolist()
    _survey(text, ranges)
    _dense(text, ranges, min(limit, 1000), label, base)


# ---- arrays ----


def _arguments(rows=2, **changed):
    text = b"1 1:2\n3 4:5\n"
    return {
        "buffer": np.frombuffer(text, np.uint8),
        "starts": np.array([0, 6], np.int64),
        "ends": np.array([5, 11], np.int64),
        "base": 0,
        "limit": 10,
        "labels": np.zeros(rows, np.float32),
        "qid": None,
        "status": np.zeros(rows, np.uint8),
        "at": np.zeros(rows, np.int64),
    } | changed


def _parse_arguments(**changed):
    given = {
        "offsets": np.array([0, 1, 2], np.int64),
        "ids": np.zeros(2, np.int64),
        "values": np.zeros(2, np.float32),
    }
    return _arguments(**given) | changed


def _unaligned(dtype, count):
    return np.zeros(count * np.dtype(dtype).itemsize + 1, np.uint8)[1:].view(dtype)


def _read_only(array):
    array.flags.writeable = False
    return array


_REFUSED = [
    ({"buffer": np.zeros(12, np.int8)}, "buffer"),
    ({"buffer": np.zeros(24, np.uint8)[::2]}, "buffer"),
    ({"starts": np.zeros(2, np.int32)}, "starts"),
    ({"ends": np.zeros(3, np.int64)}, "ends"),
    ({"ends": _unaligned(np.int64, 2)}, "ends"),
    ({"labels": np.zeros(2, np.int32)}, "labels"),
    ({"labels": np.zeros((2, 1), np.float32)}, "labels"),
    ({"labels": _read_only(np.zeros(2, np.float32))}, "labels"),
    ({"qid": np.zeros(3, np.int64)}, "qid"),
    ({"status": np.zeros(2, np.int8)}, "status"),
    ({"status": np.zeros(3, np.uint8)}, "status"),
    ({"at": np.zeros(2, np.int32)}, "at"),
    ({"base": 2}, "base: expected 0 or 1, found 2"),
    ({"limit": -1}, "limit: expected 0 or more"),
]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *_REFUSED,
        ({"offsets": np.zeros(2, np.int64)}, "offsets"),
        ({"offsets": np.zeros(3, np.int32)}, "offsets"),
        ({"offsets": np.array([0, 1, 3])}, "offsets: expected numbers that ascend"),
        ({"offsets": np.array([-1, 1, 2])}, "offsets"),
        ({"offsets": np.array([0, 2, 1])}, "offsets"),
        ({"offsets": np.array([0, 2**62, 2])}, "offsets"),
        ({"ids": np.zeros(2, np.uint32)}, "ids"),
        ({"ids": np.zeros((2, 1), np.int64)}, "ids"),
        ({"values": np.zeros(2, np.float16)}, "values"),
        ({"values": np.zeros(3, np.float32)}, "values: expected 2 numbers"),
        ({"values": np.zeros(4, np.float32)[::2]}, "values"),
    ],
)
def test_parse_refuses_wrong_arrays(changed, words):
    with pytest.raises(ValueError, match=words):
        libsvm.parse(**_parse_arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *_REFUSED,
        ({"out": np.zeros((2, 9), np.float32)}, r"out: expected .* of shape \(2, 10\)"),
        ({"out": np.zeros((3, 10), np.float32)}, "out"),
        ({"out": np.zeros(20, np.float32)}, "out"),
        ({"out": np.zeros((2, 10), np.float64)}, "out"),
        ({"out": np.zeros((10, 2), np.float32).T}, "out"),
        ({"out": _read_only(np.zeros((2, 10), np.float32))}, "out"),
    ],
)
def test_dense_refuses_wrong_arrays(changed, words):
    with pytest.raises(ValueError, match=words):
        libsvm.dense(**_arguments(out=np.zeros((2, 10), np.float32)) | changed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        *_REFUSED,
        ({"labels": np.zeros(2, np.float32)}, "labels"),
        ({"lengths": np.zeros(2, np.int64)}, "lengths"),
        ({"lengths": np.zeros(3, np.int32)}, "lengths"),
        ({"width": -1}, "width"),
        ({"label_as": "int32"}, "labels"),
    ],
)
def test_survey_refuses_wrong_arrays(changed, words):
    given = {
        "labels": np.zeros(2),
        "lengths": np.zeros(2, np.int32),
        "qid": np.zeros(2, np.int64),
    }
    if changed.get("qid", 0) is None:
        pytest.skip("a survey writes qid")
    with pytest.raises(ValueError, match=words):
        libsvm.survey(**_arguments(**given) | changed)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("labels", None, TypeError), ("ids", 3, TypeError), ("ids", bytes(16), ValueError)],
)
def test_the_extension_refuses_what_is_no_array(name, value, error):
    with pytest.raises(error):
        libsvm.parse(**_parse_arguments(**{name: value}))


def test_the_text_can_be_any_buffer(tmp_path):
    path = tmp_path / "rows.svm"
    path.write_bytes(b"1 1:2\n3 4:5\n")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for buffer in (b"1 1:2\n3 4:5\n", bytearray(b"1 1:2\n3 4:5\n"), mapped):
            arguments = _parse_arguments(buffer=buffer)
            assert libsvm.parse(**arguments) == 0
            assert arguments["ids"].tolist() == [1, 4]
            del arguments
    assert _parse(b"", [], [0]).result == 0
    assert _survey(b"", []).result == (0, NO_LIMIT, -1)


def test_memory_outside_of_the_offsets_stays():
    arguments = _parse_arguments(
        offsets=np.array([1, 3, 4], np.int64),
        ids=np.full(6, 7, np.int64),
        values=np.full(6, 7, np.float32),
    )
    assert libsvm.parse(**arguments) == 0
    assert arguments["ids"].tolist() == [7, 1, 0, 4, 7, 7]
    assert arguments["values"].tolist() == [7, 2, 0, 5, 7, 7]


# ---- threads, memory ----


def test_other_threads_run_meanwhile():
    row = b"1 " + b" ".join(b"%d:0.5" % index for index in range(200))
    count = 20_000
    starts, ends = np.zeros(count, np.int64), np.full(count, len(row))
    outputs = {
        "lengths": np.zeros(count, np.int32),
        "labels": np.zeros(count),
        "qid": np.zeros(count, np.int64),
        "status": np.zeros(count, np.uint8),
        "at": np.zeros(count, np.int64),
    }
    was_beside, found = runs_beside(lambda: libsvm.survey(row, starts, ends, **outputs))
    assert was_beside
    assert set(found) == {(0, 0, 199)}


_HUGE = """
import mmap, resource, sys
import numpy as np
from flatout.kernels import libsvm

parts = {
    "pairs": None,
    "digits": (b"1 5:0.", b"1234567890"),
    "label": (b"", b"1234567890"),
    "index": (b"1 ", b"0000000000"),
    "blanks": (b"1 ", b"          "),
    "comment": (b"1 2:3 #", b" 1:2 4:5 x"),
    "colons": (b"1 ", b"::::::::::"),
    "qid": (b"1 qid:", b"9999999999"),
}
size = 50_000_000
outputs = {
    "lengths": np.zeros(1, np.int32), "labels": np.zeros(1), "qid": np.zeros(1, np.int64),
    "status": np.zeros(1, np.uint8), "at": np.zeros(1, np.int64),
}
ends = np.zeros(2, np.int64)
assert libsvm.survey(b"1", ends[:1], ends[1:], **outputs) is not None
with open(sys.argv[1], "w+b") as file:
    file.truncate(size)
    text = mmap.mmap(file.fileno(), size)
    ends[1] = size
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), -1))
    try:
        bytearray(8 << 20)
    except MemoryError:
        pass
    else:
        raise SystemExit("the limit does not hold")
    for name, part in parts.items():
        text.seek(0)
        if part is None:
            text.write(b"1")
            for index in range(10_000_000, 10_000_000 + size // 12 - 1):
                text.write(b" %d:-1" % index)
            text.write(b" " * (size - text.tell()))
        else:
            text.write(part[0])
            while text.tell() + 10 <= size:
                text.write(part[1] * min(1000, (size - text.tell()) // 10))
            text.write(part[1][: size - text.tell()])
        libsvm.survey(text, ends[:1], ends[1:], **outputs)
        print(name, *(int(outputs[key][0]) for key in ("status", "lengths", "qid")))
"""


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="shadows all memory")
def test_memory_is_bounded_on_a_line_of_any_size(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _HUGE, str(tmp_path / "huge.svm")],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    found = {name: tuple(map(int, numbers)) for name, *numbers in words}
    assert found == {
        "pairs": (0, 50_000_000 // 12 - 1, -1),
        "digits": (0, 1, -1),
        "label": (Bad.NOT_FINITE, 0, 0),
        "index": (Bad.NO_COLON, 0, 0),
        "blanks": (0, 0, -1),
        "comment": (0, 1, -1),
        "colons": (Bad.INDEX, 0, 0),
        "qid": (Bad.TOO_LARGE, 0, 0),
    }
