from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.reading.block import Block, Ragged, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.chunked import ChunkedRows
from flatout.data.reading.schema import Column, Schema
from flatout.errors import DataError

_SCHEMA = Schema(
    format="made",
    columns=(
        Column(name="x", dtype="float32", shape=(3,)),
        Column(name="words", dtype="int64", ragged=True),
        Column(name="y", dtype="int64", role="target"),
    ),
)


class Made:
    """Chunks whose values are functions of the row's number; counts what is decoded."""

    def __init__(self, sizes, wait=0.0):
        self.schema = _SCHEMA
        self.sizes = np.array(sizes, np.int64)
        self.digest = "0123456789abcdef"
        self.decoded = []
        self.wait = wait
        self.broken = set()

    def read(self, chunk, buffers):
        self.decoded.append(chunk)
        time.sleep(self.wait)
        if chunk in self.broken:
            raise DataError(f"chunk {chunk} is broken")
        start = int(self.sizes[:chunk].sum())
        return _expected(np.arange(start, start + self.sizes[chunk]))

    def where(self, number):
        return f"made: row {number}"

    def describe(self):
        return f"{self.sizes.sum()} made rows"

    def notes(self):
        return ["a note"]


def _expected(numbers):
    lengths = numbers % 4
    words = np.concatenate([np.arange(n, n + n % 4) for n in numbers] or [np.empty(0)])
    columns = {
        "x": (numbers[:, None] * 3 + np.arange(3)).astype(np.float32),
        "words": Ragged(words.astype(np.int64), offsets_of(lengths)),
        "y": numbers * 10,
    }
    return Block(columns, numbers)


def _same(found, expected):
    assert found.numbers.tolist() == expected.numbers.tolist()
    assert found.columns.keys() == expected.columns.keys()
    for name, values in expected.columns.items():
        if isinstance(values, Ragged):
            assert found.columns[name].offsets.tolist() == values.offsets.tolist()
            assert found.columns[name].values.tolist() == values.values.tolist()
        else:
            assert found.columns[name].dtype == values.dtype
            assert found.columns[name].tolist() == values.tolist()


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any),
    st.data(),
    st.sampled_from([0, 200, 1 << 20]),
)
@settings(deadline=None, max_examples=150)
def test_any_rows_in_any_order(sizes, data, budget):
    rows = ChunkedRows(Made(sizes), budget=budget)
    assert rows.rows == sum(sizes)
    assert not rows.random
    numbers = data.draw(st.lists(st.integers(0, rows.rows - 1), max_size=20))
    numbers = np.array(numbers, np.int64)
    _same(rows.take(numbers, Buffers()), _expected(numbers))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(any), st.integers(1, 9))
@settings(deadline=None, max_examples=50)
def test_in_sequence_each_chunk_is_decoded_once(sizes, batch):
    made = Made(sizes)
    rows = ChunkedRows(made, budget=0)
    for start in range(0, rows.rows, batch):
        numbers = np.arange(start, min(rows.rows, start + batch))
        _same(rows.take(numbers, Buffers()), _expected(numbers))
    assert made.decoded == np.flatnonzero(made.sizes).tolist()


def test_what_is_given_is_no_view_of_what_is_kept():
    rows = ChunkedRows(Made([5, 5]))
    for numbers in (np.arange(5), np.arange(3, 8), np.array([4, 1])):
        first = rows.take(numbers, Buffers())
        for values in first.columns.values():
            (values.values if isinstance(values, Ragged) else values)[...] = -1
        _same(rows.take(numbers, Buffers()), _expected(numbers))


def test_the_chunks_used_last_stay_within_the_budget():
    made = Made([10] * 6)
    one = made.read(0, Buffers())
    size = one.numbers.nbytes + sum(
        v.values.nbytes + v.offsets.nbytes if isinstance(v, Ragged) else v.nbytes
        for v in one.columns.values()
    )
    made.decoded.clear()
    rows = ChunkedRows(made, budget=3 * size + size // 2)
    for chunk in (0, 1, 2, 0, 3, 0, 2):  # 1 was used longest ago when 3 comes
        rows.take(np.array([chunk * 10]), Buffers())
    assert made.decoded == [0, 1, 2, 3]
    rows.take(np.array([10]), Buffers())
    assert made.decoded == [0, 1, 2, 3, 1]


def test_threads_that_want_the_same_chunk_decode_it_once():
    made = Made([50, 50, 50], wait=0.05)
    rows = ChunkedRows(made)
    ready = threading.Barrier(8)

    def work(seed):
        numbers = np.random.default_rng(seed).integers(0, 150, 40)
        ready.wait()
        _same(rows.take(numbers, Buffers()), _expected(numbers))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sorted(made.decoded) == [0, 1, 2]


def test_an_error_reaches_all_who_wait_and_the_next_try_decodes_again():
    made = Made([5, 5], wait=0.05)
    made.broken.add(1)
    rows = ChunkedRows(made)
    ready = threading.Barrier(3)

    def work(_):
        ready.wait()
        with pytest.raises(DataError, match="chunk 1 is broken"):
            rows.take(np.arange(4, 7), Buffers())

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    made.broken.clear()
    _same(rows.take(np.arange(4, 7), Buffers()), _expected(np.arange(4, 7)))


def test_rows_that_are_not_there():
    rows = ChunkedRows(Made([5]))
    for numbers in ([5], [-1], [0, 99]):
        with pytest.raises(IndexError, match="from 0 to 4"):
            rows.take(np.array(numbers), Buffers())
    with pytest.raises(DataError, match="no rows"):
        ChunkedRows(Made([0, 0]))


def test_the_rest_comes_from_the_chunks():
    rows = ChunkedRows(Made([5]))
    assert rows.digest == "0123456789abcdef"
    assert rows.where(3) == "made: row 3"
    assert rows.describe() == "5 made rows"
    assert rows.notes() == ["a note"]
    assert rows.targets() is None
    assert rows.lengths() is None


def test_it_survives_pickling_without_what_is_decoded():
    rows = ChunkedRows(Made([5, 5]))
    rows.take(np.arange(10), Buffers())
    other = pickle.loads(pickle.dumps(rows))
    other.chunks.decoded.clear()
    _same(other.take(np.array([9, 0]), Buffers()), _expected(np.array([9, 0])))
    assert other.chunks.decoded == [0, 1]
