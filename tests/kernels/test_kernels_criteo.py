"""Rows of Criteo's click logs: as polars and Python read them, and what is wrong with bad rows."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_threads import runs_beside

from flatout.kernels import criteo
from flatout.kernels.criteo import Bad

# The fast way needs this much behind a row.
_REST = b"\n" + b"0" * 64


class Parsed:
    """Outputs that start as garbage, and what `parse` made of them."""

    def __init__(
        self,
        buffer,
        starts,
        ends,
        *,
        is_plain=False,
        dtypes=("f4", "f4", "i8"),
        widths=(13, 26),
        with_labels=True,
        **settings,
    ):
        rows = len(starts)
        self.labels = np.full(rows, 77, dtypes[0]) if with_labels else None
        self.integers = np.full((rows, widths[0]), 77, dtypes[1])
        self.categories = np.full((rows, widths[1]), 77, dtypes[2])
        self.status = np.full(rows, 77, np.uint8)
        self.at = np.full(rows, -77, np.int64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(criteo, "_is_plain", is_plain)
            self.bad = criteo.parse(
                buffer,
                np.array(starts, np.int64),
                np.array(ends, np.int64),
                labels=self.labels,
                integers=self.integers,
                categories=self.categories,
                status=self.status,
                at=self.at,
                **settings,
            )

    @property
    def bytes(self):
        arrays = (self.labels, self.integers, self.categories, self.status, self.at)
        return [None if array is None else array.tobytes() for array in arrays] + [self.bad]


def _parse(*args, **settings):
    fast, plain = Parsed(*args, **settings), Parsed(*args, is_plain=True, **settings)
    assert fast.bytes == plain.bytes
    return fast


def _parse_rows(rows, **settings):
    """Of rows as bytes; each is parsed at the end of the buffer as well, where C is careful."""
    text = b"\n".join(rows) + _REST
    ends = np.cumsum([len(row) + 1 for row in rows]) - 1
    starts = ends - [len(row) for row in rows]
    with_rest = _parse(text, starts, ends, **settings)
    for row, start, at in zip(rows, starts, with_rest.at, strict=True):
        alone = _parse(row, [0], [len(row)], **settings)
        assert alone.at[0] in (-77, at - start)
    without = _parse(text[: ends[-1]], starts, ends, **settings)
    assert with_rest.bytes == without.bytes
    return with_rest


_INTEGERS = st.one_of(st.none(), st.integers(-9, 999), st.integers(-(2**31), 2**31 - 1))
_HASHES = st.one_of(st.none(), st.integers(0, 2**32 - 1), st.integers(0, 4095))
_WIDTHS = st.tuples(st.integers(0, 14), st.integers(0, 27)).filter(any)


@st.composite
def _tables(draw):
    """Values of some rows, and their text."""
    integers, categories = draw(_WIDTHS)
    has_label = draw(st.booleans())
    values, rows = [], []
    for _ in range(draw(st.integers(1, 4))):
        label = draw(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 1))
        numbers = draw(st.lists(_INTEGERS, min_size=integers, max_size=integers))
        hashes = draw(st.lists(_HASHES, min_size=categories, max_size=categories))
        formats = st.sampled_from(["%08x", "%08X", "%x", "%4X"])
        fields = [b"%d" % label] if has_label else []
        fields += [b"" if number is None else b"%d" % number for number in numbers]
        fields += [
            b"" if one is None else (draw(formats) % one).replace(" ", "0").encode()
            for one in hashes
        ]
        values.append((label if has_label else None, numbers, hashes))
        rows.append(b"\t".join(fields))
    return values, rows, (integers, categories), has_label


@settings(deadline=None)
@given(
    _tables(),
    st.sampled_from(["f4", "i4", "i8"]),
    st.sampled_from(["f4", "i4", "i8"]),
    st.sampled_from(["i4", "i8"]),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.one_of(st.just(0), st.just(1), st.integers(1, 2**31), st.just(2**31)),
)
def test_values_are_those_of_the_text(
    table, label_dtype, integer_dtype, category_dtype, missing_integer, missing_category, buckets
):
    values, rows, widths, has_label = table
    parsed = _parse_rows(
        rows,
        dtypes=(label_dtype, integer_dtype, category_dtype),
        widths=widths,
        with_labels=has_label,
        has_label=has_label,
        missing_integer=missing_integer,
        missing_category=missing_category,
        buckets=buckets,
    )
    assert parsed.bad == 0
    assert not parsed.status.any()
    assert (parsed.at == -77).all()
    for row, (label, numbers, hashes) in enumerate(values):
        if has_label:
            assert parsed.labels[row] == np.int64(label).astype(label_dtype)
        filled = [missing_integer if number is None else number for number in numbers]
        assert (parsed.integers[row] == np.array(filled, np.int64).astype(integer_dtype)).all()
        hashed = [
            missing_category if one is None else one % buckets if buckets else one for one in hashes
        ]
        assert (parsed.categories[row] == np.array(hashed, np.int64).astype(category_dtype)).all()


def _log(rows, seed=0):
    """A text like Criteo's, with a good share of empty fields."""
    random = np.random.default_rng(seed)
    integers = np.floor(random.exponential(30, (rows, 13)) * random.lognormal(0, 2, (rows, 13)))
    hashes = random.integers(0, 2**32, (rows, 26))
    empty = random.random((rows, 39)) < 0.2
    lines = []
    for row in range(rows):
        fields = [str(int(random.random() < 0.3))]
        fields += [str(int(one) - 2) for one in integers[row]] + [
            f"{one:08x}" for one in hashes[row]
        ]
        for field in np.flatnonzero(empty[row]):
            fields[field + 1] = ""
        lines.append("\t".join(fields))
    return ("\n".join(lines) + "\n").encode()


def _ranges(text):
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
    return np.append(0, ends[:-1] + 1), ends


def test_polars_reads_the_same():
    polars = pytest.importorskip("polars")
    text = _log(500)
    names = [f"c{i}" for i in range(40)]
    dtypes = [polars.Int64] * 14 + [polars.String] * 26
    table = polars.read_csv(
        text, separator="\t", has_header=False, new_columns=names, schema_overrides=dtypes
    )
    integers = table.select(polars.col(names[1:14]).fill_null(-5)).to_numpy()
    categories = table.select(
        polars.col(names[14:]).str.to_integer(base=16).mod(1_000_003).fill_null(7)
    ).to_numpy()
    parsed = _parse(
        text,
        *_ranges(text),
        dtypes=("i8", "i8", "i8"),
        missing_integer=-5,
        missing_category=7,
        buckets=1_000_003,
    )
    assert parsed.bad == 0
    assert (parsed.labels == table["c0"].to_numpy()).all()
    assert (parsed.integers == integers).all()
    assert (parsed.categories == categories).all()


def test_rows_come_in_the_order_asked_for():
    text = _log(300)
    starts, ends = _ranges(text)
    order = np.random.default_rng(1).permutation(300)
    whole, some = _parse(text, starts, ends), _parse(text, starts[order], ends[order])
    assert (some.labels == whole.labels[order]).all()
    assert (some.integers == whole.integers[order]).all()
    assert (some.categories == whole.categories[order]).all()


def test_any_buffer_is_read(tmp_path):
    text = _log(20)
    (tmp_path / "log").write_bytes(text)
    expected = Parsed(text, *_ranges(text)).bytes
    with open(tmp_path / "log", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for buffer in (mapped, bytearray(text), memoryview(text), np.frombuffer(text, np.int8)):
        assert _parse(buffer, *_ranges(text)).bytes == expected


# ---- bad rows ----

_SOUP = st.text(alphabet="\t\t\t0123456789abcdefABCDEF-+ .\n\0gGxX\x7f\xff", max_size=300)


@settings(deadline=None, max_examples=300)
@given(
    _SOUP.map(lambda text: text.encode("latin-1")),
    st.lists(st.tuples(st.integers(-3, 310), st.integers(-3, 310)), max_size=12),
    _WIDTHS,
    st.booleans(),
    st.sampled_from([("f4", "f4", "i8"), ("i4", "i4", "i4"), ("i8", "i8", "i8")]),
)
def test_on_any_bytes_it_says_the_same_without_vectors(text, ranges, widths, has_label, dtypes):
    starts, ends = [a for a, _ in ranges], [b for _, b in ranges]
    for buffer in (text, text + _REST):
        _parse(
            buffer,
            starts,
            ends,
            widths=widths,
            has_label=has_label,
            with_labels=has_label,
            dtypes=dtypes,
        )


@settings(deadline=None, max_examples=300)
@given(_tables(), st.data())
def test_on_spoilt_rows_it_says_the_same_without_vectors(table, data):
    _, rows, widths, has_label = table
    row = bytearray(data.draw(st.sampled_from(rows)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(row)))
        width = data.draw(st.integers(0, 2))
        row[place : place + width] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"\t", b"f"])
        )
    _parse_rows([bytes(row), bytes(row)], widths=widths, has_label=has_label, with_labels=False)


_GOOD = b"1\t2\t\tff\tABCDEF01"


@pytest.mark.parametrize("before", [b"", b"0\t7\t-8\t\t\n"])
@pytest.mark.parametrize(
    ("row", "bad", "at"),
    [
        (b"", Bad.LABEL, 0),
        (b"x" + _GOOD[1:], Bad.LABEL, 0),
        (b"\t2\t3\tff\tf", Bad.LABEL, 0),
        (b"-\t2\t3\tff\tf", Bad.LABEL, 1),
        (b"1.5\t2\t3\tff\tf", Bad.LABEL, 1),
        (b"12 \t2\t3\tff\tf", Bad.LABEL, 2),
        (b"+1\t2\t3\tff\tf", Bad.LABEL, 0),
        (b"2147483648\t2\t3\tff\tf", Bad.INTEGER_OVERFLOW, 0),
        (b"1", Bad.TOO_FEW_FIELDS, 1),
        (b"1\t", Bad.TOO_FEW_FIELDS, 2),
        (b"1\t2\t3\tff", Bad.TOO_FEW_FIELDS, 8),
        (b"1\t22\t3\tff", Bad.TOO_FEW_FIELDS, 9),
        (_GOOD + b"\t", Bad.TOO_MANY_FIELDS, len(_GOOD)),
        (_GOOD + b"\t1\t2", Bad.TOO_MANY_FIELDS, len(_GOOD)),
        (b"1\t2x\t3\tff\tf", Bad.INTEGER, 3),
        (b"1\t2\t--3\tff\tf", Bad.INTEGER, 5),
        (b"1\t2\t-\tff\tf", Bad.INTEGER, 5),
        (b"1\t2\t3.0\tff\tf", Bad.INTEGER, 5),
        (b"1\tnan\t3\tff\tf", Bad.INTEGER, 2),
        (b"1\t2\t123456789x\tff\tf", Bad.INTEGER, 13),
        (b"1\t2147483648\t3\tff\tf", Bad.INTEGER_OVERFLOW, 2),
        (b"1\t-2147483649\t3\tff\tf", Bad.INTEGER_OVERFLOW, 2),
        (b"1\t2\t" + b"9" * 5000 + b"\tff\tf", Bad.INTEGER_OVERFLOW, 4),
        (b"1\t2\t" + b"9" * 500 + b"x\tff\tf", Bad.INTEGER, 504),
        (b"1\t2\t3\tfg\tf", Bad.HEX, 7),
        (b"1\t2\t3\tff\t0x12", Bad.HEX, 10),
        (b"1\t2\t3\tff\t-1", Bad.HEX, 9),
        (b"1\t2\t3\tff\tffff\r", Bad.HEX, 13),
        (b"1\t2\t3\tff\t012345678", Bad.HEX_TOO_LONG, 17),
        (b"1\t2\t3\t000000000\tf", Bad.HEX_TOO_LONG, 14),
        (b"1\t2\t3\t01234567x\tf", Bad.HEX, 14),
        (b"1\t2\t3\t0123456789x\tf", Bad.HEX_TOO_LONG, 14),
        (b"1\t2\t3\t \tf", Bad.HEX, 6),
    ],
)
def test_each_fault_is_named_with_its_byte(row, bad, at, before):
    text = before + row
    parsed = []
    for buffer in (text, text + _REST):
        parsed.append(
            _parse(buffer, [len(before)], [len(text)], widths=(2, 2), dtypes=("i4", "i4", "i8"))
        )
        assert parsed[-1].bad == 1
        assert (Bad(parsed[-1].status[0]), parsed[-1].at[0]) == (bad, len(before) + at)
        for array in (parsed[-1].labels, parsed[-1].integers, parsed[-1].categories):
            assert not array.any()


@pytest.mark.parametrize(("field", "place"), [(0, 0), (0, 6), (2, 4), (3, 7), (4, 0), (4, 5)])
def test_every_byte_is_a_digit_or_a_fault(field, place):
    """Five integers of digits, five categories, and any byte in one of them."""
    rows = []
    for byte in range(256):
        fields = [bytearray(b"12345678") for _ in range(10)]
        fields[field][place] = fields[field + 5][place] = byte
        rows += [b"\t".join(fields[:5]), b"\t".join(fields[5:])]
    ends = np.cumsum([len(row) + 1 for row in rows]) - 1
    starts = ends - [len(row) for row in rows]
    settings = {"has_label": False, "with_labels": False, "dtypes": ("f4", "i8", "i8")}
    text = b"\n".join(rows) + _REST
    integers = _parse(text, starts[::2], ends[::2], widths=(5, 0), **settings)
    categories = _parse(text, starts[1::2], ends[1::2], widths=(0, 5), **settings)
    good = set(b"0123456789") | ({ord("-")} if place == 0 else set())
    assert set(np.flatnonzero(integers.status == 0).tolist()) == good
    assert set(np.flatnonzero(categories.status == 0).tolist()) == set(b"0123456789abcdefABCDEF")
    for byte in range(ord("0"), ord("9") + 1):
        assert integers.integers[byte, field] == int(rows[2 * byte].split(b"\t")[field])
    for byte in b"0123456789abcdefABCDEF":
        assert categories.categories[byte, field] == int(rows[2 * byte + 1].split(b"\t")[field], 16)


def test_every_fault_has_words():
    for bad in Bad:
        assert "expected " in bad.words
        assert "found " in bad.words


@pytest.mark.parametrize(
    ("start", "end"),
    [(-1, 3), (0, 1000), (5, 4), (1000, 1001), (-(2**63), 2**63 - 1), (2**63 - 1, -(2**63))],
)
def test_a_range_outside_of_the_buffer_is_a_bad_row(start, end):
    parsed = _parse(_GOOD + _REST, [0, start, 0], [len(_GOOD), end, len(_GOOD)], widths=(2, 2))
    assert parsed.bad == 1
    assert parsed.status.tolist() == [0, Bad.OUTSIDE, 0]
    assert parsed.at.tolist() == [-77, start, -77]
    assert parsed.categories.tolist() == [[255, 0xABCDEF01], [0, 0], [255, 0xABCDEF01]]


@pytest.mark.parametrize(
    ("dtype", "largest", "smallest"),
    [("i4", 2**31 - 1, -(2**31)), ("i8", 2**63 - 1, -(2**63)), ("f4", 2**63 - 1, -(2**63))],
)
def test_integers_reach_to_the_limits_of_their_dtype(dtype, largest, smallest):
    rows = [b"%d\t%d" % (one, one) for one in (largest, smallest, largest + 1, smallest - 1)]
    rows.append(b"-000000000000000000000000000000\t0000000000000000000000000000000000012")
    parsed = _parse_rows(rows, widths=(1, 0), dtypes=(dtype, dtype, "i8"))
    assert parsed.status.tolist() == [0, 0, Bad.INTEGER_OVERFLOW, Bad.INTEGER_OVERFLOW, 0]
    expected = np.array([largest, smallest, 0, 0, 12], np.int64).astype(dtype)
    assert (parsed.integers[:, 0] == expected).all()
    assert (parsed.labels[:4] == expected[:4]).all()


def test_int32_without_buckets_gets_the_same_bits():
    hashes = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    rows = [b"%08x" % one for one in hashes]
    settings = {"widths": (0, 1), "has_label": False, "with_labels": False}
    narrow = _parse_rows(rows, dtypes=("f4", "f4", "i4"), **settings)
    wide = _parse_rows(rows, dtypes=("f4", "f4", "i8"), **settings)
    assert narrow.categories[:, 0].view(np.uint32).tolist() == hashes
    assert wide.categories[:, 0].tolist() == hashes


@settings(deadline=None)
@given(st.integers(1, 2**63 - 1) | st.integers(1, 2**33) | st.integers(1, 100))
def test_buckets_are_the_remainder(buckets):
    hashes = [0, 1, 99, 2**31, 2**32 - 1, buckets % 2**32, (buckets - 1) % 2**32]
    row = b"\t".join(b"%x" % one for one in hashes)
    parsed = _parse_rows(
        [row], widths=(0, len(hashes)), has_label=False, with_labels=False, buckets=buckets
    )
    assert parsed.categories[0].tolist() == [one % buckets for one in hashes]


def test_an_empty_integer_can_become_nan():
    parsed = _parse_rows([b"1\t\t5"], widths=(2, 0), missing_integer=float("nan"))
    assert np.isnan(parsed.integers[0, 0])
    assert parsed.integers[0, 1] == 5


def test_labels_that_are_not_wanted_are_checked_all_the_same():
    parsed = _parse_rows([b"1\t5", b"x\t5", b"99999999999\t5"], widths=(1, 0), with_labels=False)
    assert parsed.status.tolist() == [0, Bad.LABEL, 0]
    assert parsed.integers[:, 0].tolist() == [5, 0, 5]


def test_no_rows_are_no_fault():
    assert _parse(b"", [], []).bad == 0
    assert _parse(b"", [0], [0]).status.tolist() == [Bad.LABEL]


# ---- refusals ----


def _arguments(rows=3):
    return {
        "buffer": _GOOD * rows,
        "starts": np.zeros(rows, np.int64),
        "ends": np.full(rows, len(_GOOD)),
        "labels": np.zeros(rows, np.float32),
        "integers": np.zeros((rows, 2), np.float32),
        "categories": np.zeros((rows, 2), np.int64),
        "status": np.zeros(rows, np.uint8),
        "at": np.zeros(rows, np.int64),
    }


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"buffer": np.zeros((4, 4), np.uint8)[:, ::2]}, "buffer: expected C-contiguous"),
        ({"starts": np.zeros(3, np.int32)}, "starts"),
        ({"starts": np.zeros(4, np.int64)}, "ends"),
        ({"labels": np.zeros(3, np.float64)}, "labels: expected"),
        ({"labels": np.zeros(2, np.float32)}, "labels: expected"),
        ({"has_label": False}, "labels: expected None"),
        ({"integers": np.zeros((3, 2), np.float16)}, "integers: expected"),
        ({"integers": np.zeros(6, np.float32)}, "integers: expected"),
        ({"integers": _read_only(np.zeros((3, 2), np.float32))}, "integers: expected C-contiguous"),
        ({"categories": np.zeros((3, 2), np.float32)}, "categories: expected"),
        ({"categories": np.zeros((2, 2), np.int64)}, "categories: expected"),
        ({"status": np.zeros(3, np.int8)}, "status: expected"),
        ({"at": np.zeros(3, np.uint64)}, "at: expected"),
        ({"at": np.zeros(25, np.uint8)[1:].view(np.int64)}, "at: expected"),
        ({"missing_integer": 1e39}, "missing_integer: expected a number that fits into float32"),
        ({"missing_category": 2**63}, "missing_category: expected a number that fits into int64"),
        ({"missing_category": float("nan")}, "missing_category: expected"),
        (
            {"integers": np.zeros((3, 2), np.int32), "missing_integer": 2**31},
            "missing_integer: expected a number that fits into int32",
        ),
        ({"integers": np.zeros((3, 2), np.int32), "missing_integer": 0.5}, "found 0.5"),
        ({"buckets": -1}, "buckets: expected"),
        ({"buckets": 2**63}, "buckets: expected"),
        ({"buckets": 2**31 + 1, "categories": np.zeros((3, 2), np.int32)}, "buckets: expected"),
        (
            {
                "has_label": False,
                "labels": None,
                "integers": np.zeros((3, 0), np.float32),
                "categories": np.zeros((3, 0), np.int64),
            },
            "at least one field",
        ),
    ],
)
def test_wrong_arguments_are_refused(changed, words):
    arguments = _arguments() | changed
    buffer, starts, ends = (arguments.pop(name) for name in ("buffer", "starts", "ends"))
    with pytest.raises(ValueError, match=words):
        criteo.parse(buffer, starts, ends, **arguments)
    assert not arguments["status"].any()


# ---- threads ----


def test_other_threads_run_meanwhile():
    text = _log(2000)
    starts, ends = (np.tile(one, 100) for one in _ranges(text))
    was_beside, bad = runs_beside(lambda: Parsed(text, starts, ends).bad)
    assert was_beside
    assert set(bad) == {0}


@example(b"1\t2\t3\tff\t" + b"0" * 9 + b"\n")
@settings(deadline=None)
@given(st.binary(max_size=200))
def test_text_that_others_change_is_read_within_its_bounds(noise):
    # What lies beyond the row must not matter: the fast way reads it.
    row = b"0\t-7\t123456\t1234abcd\t"
    expected = _parse(row, [0], [len(row)], widths=(2, 2)).bytes
    assert _parse(row + noise + _REST, [0], [len(row)], widths=(2, 2)).bytes == expected
