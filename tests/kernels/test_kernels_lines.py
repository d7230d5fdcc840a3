"""Lines, byte ranges and rows: as Python has them, and wrong input is refused."""

from __future__ import annotations

import mmap
import os
import signal
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernel_threads import runs_beside

from flatout.kernels import lines
from flatout.kernels.lines import FileTooShort


def _index(buffer, *args, **options):
    starts, ends = lines.index_lines(buffer, *args, **options)
    assert starts.dtype == ends.dtype == np.int64
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _expected(text, start, stop, skip_blank, comment, white):
    """As one would write it down in Python."""
    ranges = []
    pieces = text[start:stop].split(b"\n")
    if not pieces[-1]:
        pieces.pop()
    for piece in pieces:
        line = piece.removesuffix(b"\r")
        stripped = line.lstrip(white) if white else line
        is_comment = comment is not None and stripped.startswith(comment)
        if not is_comment and (stripped or not skip_blank):
            ranges.append((start, start + len(line)))
        start += len(piece) + 1
    return ranges


# ---- lines ----

_TEXT = st.one_of(
    st.lists(st.sampled_from([b"\n", b"\r", b" ", b"\t", b"#", b"#!", b"a", b"b" * 70, b"\0\xff"]))
    .map(b"".join),
    st.binary(max_size=300),
)  # fmt: skip
_PARTS = st.tuples(st.integers(0, 400), st.integers(0, 400)).map(sorted)


@settings(deadline=None, max_examples=300)
@given(
    _TEXT,
    _PARTS,
    st.booleans(),
    st.sampled_from([b"#", b"#!", None]),
    st.sampled_from([lines.WHITE, b" ", b""]),
)
def test_lines_are_those_that_python_splits(text, part, skip_blank, comment, white):
    start, stop = (min(one, len(text)) for one in part)
    options = {"skip_blank": skip_blank, "comment": comment, "white": white}
    expected = _expected(text, start, stop, **options)
    assert _index(text, start, stop, **options) == expected


def test_blank_lines_and_comments_are_left_out_by_default():
    text = b"# what this is\n1 2\r\n\n \t\r\n  # more\n3 # 4"
    assert [text[a:b] for a, b in _index(text)] == [b"1 2", b"3 # 4"]
    assert text[slice(*_index(text, comment=None)[0])] == b"# what this is"
    assert [text[a:b] for a, b in _index(text, skip_blank=False)][1:3] == [b"", b" \t"]


def test_a_line_of_tabs_is_a_row_where_tabs_separate():
    assert _index(b"\t\t\n\n\t\n", white=b"") == [(0, 2), (4, 5)]


def _long_text():
    """Far more lines than there is room for at first: short ones, then long ones, then short."""
    random = np.random.default_rng(0)
    lengths = np.concatenate([random.integers(0, 3, 20_000), random.integers(0, 900, 5_000)])
    lengths = np.concatenate([lengths, lengths[::-1]])
    return b"\n".join(b"x" * one for one in lengths.tolist())


def test_room_grows_with_the_lines():
    text = _long_text()
    expected = _expected(text, 0, len(text), False, b"#", lines.WHITE)
    assert _index(text, skip_blank=False) == expected
    assert len(expected) == 50_000


def test_any_buffer_has_lines(tmp_path):
    text = b"one\ntwo\n"
    (tmp_path / "text").write_bytes(text)
    with open(tmp_path / "text", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for buffer in (mapped, bytearray(text), memoryview(text), np.frombuffer(text, np.int16)):
        assert _index(buffer) == [(0, 3), (4, 7)]
    for empty in (b"", np.empty(0), np.empty((3, 0), np.uint8)):
        assert _index(empty) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"start": -1}, "0 <= start <= stop <= 4, found start -1"),
        ({"stop": 5}, "stop 5"),
        ({"start": 3, "stop": 2}, "found start 3, stop 2"),
        ({"comment": b""}, "comment: expected"),
        ({"comment": b"#\n"}, "comment: expected"),
        ({"buffer": np.zeros((4, 4), np.uint8)[:, ::2]}, "C-contiguous"),
    ],
)
def test_wrong_ranges_of_text_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        lines.index_lines(**({"buffer": b"1\n2\n"} | options))


# ---- byte ranges of a file ----


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A file of 200,000 bytes that are all known, and its descriptor."""
    content = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()
    path = tmp_path_factory.mktemp("read") / "numbers"
    path.write_bytes(content)
    with open(path, "rb") as file:
        yield content, file.fileno()


def _places(lengths):
    return np.cumsum(np.append(0, lengths[:-1]))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 199_000) | st.integers(0, 9000),
            st.integers(0, 800) | st.just(0) | st.just(1),
        ),
        max_size=40,
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_rows_are_the_bytes_of_the_file(numbers, ranges, is_sorted, random):
    content, fd = numbers
    ranges = sorted(ranges) if is_sorted else ranges
    starts = np.array([a for a, _ in ranges], np.int64)
    lengths = np.array([b for _, b in ranges], np.int64)
    order = list(range(len(ranges)))
    random.shuffle(order)
    # In any order in memory as well, with a gap after each.
    places = np.zeros(len(ranges), np.int64)
    places[order] = _places(lengths[order] + 3) if len(ranges) else 0
    size = int((lengths + 3).sum())
    out = np.full(size, 7, np.uint8)
    lines.read_rows(fd, starts, starts + lengths, out, places)
    expected = np.full(size, 7, np.uint8)
    for (start, length), place in zip(ranges, places.tolist(), strict=True):
        expected[place : place + length] = list(content[start : start + length])
    assert (out == expected).all()


def test_many_rows_side_by_side_are_read(numbers):
    content, fd = numbers
    starts = np.arange(0, 190_000, 11)
    out = np.empty(10 * len(starts), np.uint8)
    lines.read_rows(fd, starts, starts + 10, out, np.arange(len(starts)) * 10)
    expected = np.frombuffer(content, np.uint8)[: 11 * len(starts)].reshape(-1, 11)[:, :10]
    assert (out.reshape(-1, 10) == expected).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts Linux's system calls")
@pytest.mark.parametrize(
    # A call takes 512 parts: rows, and what lies between them.
    ("gap", "expected_calls"),
    [(0, 2), (1, 4), (4095, 4), (4096, 1000), (-1, 1000)],
)
def test_near_rows_are_read_together(tmp_path, gap, expected_calls):
    (tmp_path / "file").write_bytes(b"x" * 5_000_000)
    starts = np.arange(1000) * (4 + gap)
    out = np.empty(4000, np.uint8)

    def calls():
        with open("/proc/thread-self/io") as file:
            return int(next(line for line in file if line.startswith("syscr")).split()[1])

    with open(tmp_path / "file", "rb") as file:
        own = -calls() + calls()
        before = calls()
        lines._c.read(file.fileno(), starts, starts + 4, out, np.arange(1000) * 4)
        made = calls() - before - own
    assert made == expected_calls
    assert (out == ord("x")).all()


def test_a_file_that_became_shorter_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789" * 1000)
    starts = np.array([9000, 100, 5000, 5020, 9995])
    out = np.empty(60, np.uint8)
    with open(path, "rb") as file:
        lines.read_rows(file.fileno(), starts, starts + 5, out, np.arange(5) * 12)
        for size, row, at in [(9997, 4, 9997), (5022, 0, 9000), (9004, 0, 9004), (0, 0, 9000)]:
            os.truncate(path, size)
            with pytest.raises(EOFError, match=f"row {row}: .* byte {at} .* {size} bytes") as error:
                lines.read_rows(file.fileno(), starts, starts + 5, out, np.arange(5) * 12)
            assert isinstance(error.value, FileTooShort)
            assert (error.value.row, error.value.at) == (row, at)
        # Between two rows that are read together, and in the second of them.
        for size, row, at in [(5010, 1, 5020), (5020, 1, 5020), (5021, 1, 5021), (5002, 0, 5002)]:
            path.write_bytes(b"x" * size)
            with pytest.raises(FileTooShort) as error:
                lines.read_rows(file.fileno(), starts[2:4], starts[2:4] + 5, out, np.arange(2) * 12)
            assert (error.value.row, error.value.at) == (row, at)


def test_a_file_without_a_place_is_an_os_error():
    read, write = os.pipe()
    rows = np.zeros(1, np.int64), np.ones(1, np.int64), np.empty(1, np.uint8), np.zeros(1, np.int64)
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            lines.read_rows(read, *rows)
        with pytest.raises(OSError, match="Bad file descriptor"):
            lines.read_rows(1 << 20, *rows)
    finally:
        os.close(read)
        os.close(write)


_BIG = 2**63 - 1


@pytest.mark.parametrize(
    ("start", "end", "place"),
    [(-1, 1, 0), (5, 4, 0), (0, 11, 0), (0, 5, 6), (0, 5, -1), (0, _BIG, 0), (0, 0, 11),
     (-_BIG, _BIG, 0), (0, 1, _BIG)],
)  # fmt: skip
def test_rows_without_room_are_refused_before_anything_is_read(numbers, start, end, place):
    out = np.full(10, 7, np.uint8)
    starts, ends, places = np.array([[0, 3, 0], [start, end, place]]).T.copy()
    with pytest.raises(ValueError, match="row 1: its bytes or its place in out are out of range"):
        lines.read_rows(numbers[1], starts, ends, out, places)
    assert (out == 7).all()


_ONES = np.ones(3, np.int64)


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (1, np.ones(3, np.int32)),
        (1, np.ones((3, 1), np.int64)),
        (2, np.ones(4, np.int64)),
        (2, np.ones(3, np.uint64)),
        (4, np.ones(6, np.int64)[::2]),
        (4, np.ones(2, np.int64)),
        (3, np.zeros(4, np.int8)),
        (3, np.zeros((4, 1), np.uint8)),
        (3, np.zeros(8, np.uint8)[::2]),
        (3, np.frombuffer(b"1234", np.uint8)),
    ],
)
def test_wrong_arrays_to_read_are_refused(numbers, position, value):
    arguments = [numbers[1], _ONES, _ONES, np.zeros(4, np.uint8), _ONES]
    lines.read_rows(*arguments)
    arguments[position] = value
    with pytest.raises(ValueError, match=r"expected|shares memory"):
        lines.read_rows(*arguments)


def test_a_signal_is_handled_and_reading_goes_on(numbers):
    """The handler runs between two calls of the system, or after the last: no row is lost."""
    content, fd = numbers
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    starts = np.tile(np.array([0, 100_000]), 2000)
    out = np.empty(100_000, np.uint8)
    try:
        for _ in range(20):
            lines.read_rows(fd, starts, starts + 100_000, out, starts * 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert out.tobytes() == content[100_000:]


# ---- rows to columns and back ----

_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.byte_string_dtypes(min_len=1),
    st.just(np.dtype([("Offset", "<i2"), ("value", "<f8")], align=True)),
)


def _raw(array):
    return array.reshape(-1).view(np.uint8).tobytes() if array.size else b""


@st.composite
def _columns(draw):
    """Arrays of as many rows each, of any bytes, and where they lie in a row with gaps."""
    rows = draw(st.integers(0, 20))
    columns, offset = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 4))):
        dtype = draw(_DTYPES)
        shape = (rows, *draw(st.lists(st.integers(0, 4), max_size=2)))
        size = int(np.prod(shape)) * dtype.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
        array = np.frombuffer(raw, np.uint8).view(dtype) if size else np.empty(0, dtype)
        width = int(np.prod(shape[1:])) * dtype.itemsize
        columns.append((offset, width, array.reshape(shape)))
        offset += width + draw(st.integers(0, 3))
    return rows, columns, offset


@settings(deadline=None)
@given(_columns(), st.data())
def test_columns_become_rows_and_columns_again(case, data):
    rows, columns, stride = case
    rows = rows if columns else 0
    index = st.lists(st.integers(0, rows - 1), max_size=30) if rows else st.just([])
    index = np.array(data.draw(index), np.int64)

    joined = np.full((rows, stride), 7, np.uint8)
    lines.join_rows(columns, joined)
    some = np.full((len(index), stride), 7, np.uint8)
    lines.join_rows(columns, some, index)
    split = [
        (offset, width, np.zeros((len(index), *array.shape[1:]), array.dtype))
        for offset, width, array in columns
    ]
    lines.split_rows(joined, index, split)
    covered = np.zeros(stride, bool)
    for offset, width, _ in columns:
        covered[offset : offset + width] = True
    assert (joined[:, ~covered] == 7).all()
    assert (some == joined[index]).all()
    for (_, width, array), (_, _, one) in zip(columns, split, strict=True):
        # Bytes, not values: padding inside a record counts too.
        expected = b"".join(_raw(array)[i * width : (i + 1) * width] for i in index.tolist())
        assert _raw(one) == expected


def test_many_wide_columns_go_in_any_order():
    random = np.random.default_rng(0)
    widths = random.integers(1, 3000, 40)
    offsets = np.append(0, np.cumsum(widths)[:-1])
    source = random.integers(0, 256, (50, int(widths.sum())), np.uint8)
    index = random.permutation(50)
    columns = [
        (int(a), int(w), np.zeros((50, int(w)), np.uint8))
        for a, w in random.permutation(np.stack([offsets, widths], 1))
    ]
    lines.split_rows(source, index, columns)
    for offset, width, array in columns:
        assert (array == source[index, offset : offset + width]).all()
    again = np.zeros_like(source)
    lines.join_rows(columns, again, np.argsort(index))
    assert (again == source).all()


def test_of_columns_on_the_same_bytes_the_last_wins():
    out = np.zeros((2, 3), np.uint8)
    first, second = np.full((2, 2), 1, np.uint8), np.full((2, 2), 2, np.uint8)
    lines.join_rows([(0, 2, first), (1, 2, second)], out)
    assert out.tolist() == [[1, 2, 2], [1, 2, 2]]


@pytest.mark.parametrize("value", [-1, 4, 2**63 - 1, -(2**63)])
def test_a_wrong_index_is_named_and_nothing_is_written(value):
    rows = np.zeros((4, 8), np.uint8)
    index = np.array([0, 1, value])
    column = np.full((3, 2), 9, np.float32)
    with pytest.raises(IndexError, match=rf"index\[2\] is {value}, but there are 4 rows"):
        lines.split_rows(rows, index, [(0, 8, column)])
    assert (column == 9).all()
    out = np.full((3, 8), 9, np.uint8)
    with pytest.raises(IndexError, match=rf"index\[2\] is {value}, but there are 4 rows"):
        lines.join_rows([(0, 8, np.zeros((4, 2), np.float32))], out, index)
    assert (out == 9).all()


_ROWS = np.zeros((4, 8), np.uint8)
_TWO = np.array([0, 3])


def _read_only(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"source": np.zeros((4, 8), np.int8)}, "source: expected"),
        ({"source": np.zeros(32, np.uint8)}, "source: expected"),
        ({"source": np.zeros((4, 16), np.uint8)[:, ::2]}, "source: expected C-contiguous"),
        ({"index": np.array([0, 1], np.int32)}, "index: expected"),
        ({"index": np.arange(4)[::2]}, "index: expected .*C-contiguous"),
        ({"columns": [(-1, 4, np.zeros(2, np.int32))]}, "4 bytes at -1 are not in a row of 8"),
        ({"columns": [(5, 4, np.zeros(2, np.int32))]}, "column 0: 4 bytes at 5 are not"),
        ({"columns": [(0, 2**62, np.zeros(2, np.int32))]}, "bytes at 0 are not"),
        ({"columns": [(0, -4, np.zeros(2, np.int32))]}, "column 0: -4 bytes at 0 are not"),
        ({"columns": [(0, 4, np.zeros(3, np.int32))]}, "column 0: expected 2 .*rows of 4 bytes"),
        ({"columns": [(0, 4, np.zeros(2, np.int64))]}, "column 0: expected 2 .*rows of 4 bytes"),
        ({"columns": [(0, 4, np.zeros((4, 2), np.uint8))]}, "column 0: expected 2 .*rows"),
        ({"columns": [(0, 8, np.zeros((), np.int64))]}, "column 0: expected 2 .*rows"),
        ({"columns": [(0, 4, np.zeros((2, 4), np.int16)[:, ::2])]}, "C-contiguous"),
        ({"columns": [(0, 4, np.zeros((4, 2), "S2").T)]}, "C-contiguous"),
        ({"columns": [(0, 8, np.zeros(2, object))]}, "Python objects"),
        ({"columns": [(0, 4, _read_only(np.zeros(2, np.int32)))]}, "can be written"),
    ],
)  # fmt: skip
def test_wrong_arrays_to_split_are_refused(changed, words):
    good = {"source": _ROWS, "index": _TWO, "columns": [(0, 4, np.zeros(2, np.int32))]}
    lines.split_rows(**good)
    with pytest.raises(ValueError, match=words):
        lines.split_rows(**(good | changed))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"out": np.zeros((3, 8), np.uint8)}, "out: expected 4 rows, found 3"),
        ({"out": np.zeros((4, 3), np.uint8)}, "column 0: 4 bytes at 0 are not in a row of 3"),
        ({"out": _read_only(np.zeros((4, 8), np.uint8))}, "can be written"),
        ({"out": np.zeros((4, 8), np.float32)}, "out: expected"),
        ({"index": np.zeros(3, np.int64)}, "index: expected 4 numbers, found 3"),
        ({"index": np.zeros(4, np.float64)}, "index: expected"),
        ({"columns": [(0, 4, np.zeros(4, "i4")), (4, 4, np.zeros(3, "i4"))]}, "column 1: expected"),
        ({"columns": [(0, 8, np.zeros((), np.int64))]}, "column 0: expected 0 .*rows"),
        ({"columns": []}, "out: expected 0 rows, found 4"),
    ],
)  # fmt: skip
def test_wrong_arrays_to_join_are_refused(changed, words):
    out = np.zeros((4, 8), np.uint8)
    good = {"columns": [(0, 4, np.zeros(4, np.int32))], "out": out}
    lines.join_rows(**good)
    with pytest.raises(ValueError, match=words):
        lines.join_rows(**(good | changed))


# ---- threads ----


def _find(_):
    text = np.full(60_000_000, ord("x"), np.uint8)
    return lambda: lines.index_lines(text)


def _read(folder):
    (folder / "large").write_bytes(bytes(1 << 20))
    starts, out = np.zeros(500, np.int64), np.empty(1 << 20, np.uint8)

    def read():
        with open(folder / "large", "rb") as file:
            lines.read_rows(file.fileno(), starts, starts + (1 << 20), out, starts)

    return read


def _split(_):
    source, index = np.zeros((100, 4096), np.uint8), np.arange(100).repeat(500)
    columns = [(0, 4096, np.empty((len(index), 4096), np.uint8))]
    return lambda: lines.split_rows(source, index, columns)


def _join(_):
    column, index = np.zeros((100, 4096), np.uint8), np.arange(100).repeat(500)
    out = np.empty((len(index), 4096), np.uint8)
    return lambda: lines.join_rows([(0, 4096, column)], out, index)


@pytest.mark.parametrize("prepare", [_find, _read, _split, _join])
def test_other_threads_run_meanwhile(prepare, tmp_path):
    was_beside, _ = runs_beside(prepare(tmp_path))
    assert was_beside
