from __future__ import annotations

import datetime
import decimal
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.data
from flatout.data.reading.block import Ragged
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.chunked import ChunkedRows
from flatout.data.reading.files import find
from flatout.errors import DataError

pa = pytest.importorskip("pyarrow")
import pyarrow.feather as feather  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from flatout.data.sources.arrow.arrow_schema import ColumnOptions  # noqa: E402
from flatout.data.sources.arrow.table_chunks import ArrowFile, ParquetFile, table_chunks  # noqa: E402

_KINDS = ["parquet", "arrow"]


def _write(path, table, rows=1 << 20, **options):
    """Written in the format of the name's ending, in parts of so many rows."""
    table = table if isinstance(table, pa.Table) else pa.table(table)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, write_page_checksum=True, **options)
    else:
        with pa.OSFile(str(path), "wb") as file:
            writer = pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(**options))
            with writer:
                writer.write_table(table, max_chunksize=rows)
    return path


def _pipeline(path, **arguments):
    kind = "parquet" if str(path).endswith("parquet") else "arrow"
    return getattr(flatout.data, kind)(path, **arguments)


def _all(pipeline, batch=1000):
    (whole,) = list(pipeline.batch(batch).batches(0))
    return whole


def _chunks(path, schema=None, **wanted):
    kind = "parquet" if str(path).endswith("parquet") else "arrow"
    kinds = {"parquet": ParquetFile, "arrow": ArrowFile}
    return table_chunks(kind, [kinds[kind](f) for f in find(path)], schema, ColumnOptions(**wanted))


# ---- what comes out ----


@pytest.mark.parametrize("kind", _KINDS)
def test_dtypes_of_numbers(tmp_path, kind):
    dtypes = {
        "bool": torch.bool,
        "uint8": torch.uint8,
        "uint16": torch.int32,
        "uint32": torch.int64,
        "uint64": torch.int64,
        "int8": torch.int8,
        "int16": torch.int16,
        "int32": torch.int32,
        "int64": torch.int64,
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float32,
    }
    table = pa.table({name: pa.array(np.array([0, 1, 1], name)) for name in dtypes})
    table = table.append_column(
        "money", pa.array([decimal.Decimal("0.25"), decimal.Decimal("1"), decimal.Decimal("1")])
    )
    table = table.append_column("coded", pa.array([0.5, 1.5, 0.5]).dictionary_encode())
    batch = _all(_pipeline(_write(tmp_path / f"a.{kind}", table)))
    for name, dtype in dtypes.items():
        assert batch.inputs[name].dtype == dtype, name
        assert batch.inputs[name].tolist() == [0, 1, 1]
    assert batch.inputs["money"].tolist() == [0.25, 1, 1]
    assert batch.inputs["coded"].tolist() == [0.5, 1.5, 0.5]


@pytest.mark.parametrize("kind", _KINDS)
def test_roles(tmp_path, kind):
    columns = {"a": [1, 2], "b": [1.5, 2.5], "y": pa.array([0, 1], pa.int8()), "w": [0.5, 1.0]}
    path = _write(tmp_path / f"a.{kind}", columns)
    batch = _all(_pipeline(path, target="y", weight="w", unused=["a"]))
    assert batch.inputs.tolist() == [1.5, 2.5]
    assert batch.targets.dtype == torch.int64
    assert batch.targets.tolist() == [0, 1]
    assert batch.weight.tolist() == [0.5, 1]
    batch = _all(_pipeline(path, target=["y", "w"], inputs=["b", "a"]))
    assert sorted(batch.inputs) == ["a", "b"]
    assert sorted(batch.targets) == ["w", "y"]
    batch = _all(_pipeline(path, inputs="a"))
    assert batch.targets is None


@pytest.mark.parametrize("kind", _KINDS)
def test_stacked_inputs_beside_lists_and_categories(tmp_path, kind):
    columns = {
        "a": [1, 2],
        "b": [1.5, 2.5],
        "c": [True, False],
        "t": ["x", "y"],
        "v": [[1.0], [2.0, 3.0]],
        "y": [0, 1],
    }
    path = _write(tmp_path / f"a.{kind}", columns)
    pipeline = _pipeline(path, target="y", stack=True, categories={"t": ["y", "x"]})
    batch = _all(pipeline)
    assert batch.inputs["inputs"].tolist() == [[1, 1.5, 1], [2, 2.5, 0]]
    assert batch.inputs["t"].tolist() == [1, 0]
    assert batch.inputs["v"].tolist() == [[1, 0], [2, 3]]
    again = _all(_pipeline(path, schema=pipeline.schema))
    assert torch.equal(again.inputs["inputs"], batch.inputs["inputs"])


@pytest.mark.parametrize("kind", _KINDS)
def test_lists_of_one_size_have_a_shape(tmp_path, kind):
    inner = pa.list_(pa.list_(pa.int32(), 2), 3)
    values = np.arange(24).reshape(4, 3, 2)
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(values.astype(np.float32))
    table = {"a": pa.array(values.tolist(), inner), "b": tensor, "y": [0, 1, 0, 1]}
    pipeline = _pipeline(_write(tmp_path / f"a.{kind}", table, 3), target="y")
    assert pipeline.schema["a"].shape == (3, 2)
    batch = _all(pipeline)
    assert batch.inputs["a"].tolist() == values.tolist()
    assert batch.inputs["b"].tolist() == values.tolist()


@pytest.mark.parametrize("kind", _KINDS)
def test_lists_are_ragged_unless_the_schema_tells_their_length(tmp_path, kind):
    table = {"a": [[1, 2], [3, 4], [5, 6]], "s": pa.array([["x"], [], ["y", "x"]])}
    path = _write(tmp_path / f"a.{kind}", table)
    batch = _all(_pipeline(path, categories={"s": ["x", "y"]}))
    assert batch.inputs["a"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert batch.inputs["s"].tolist() == [[0, 0], [0, 0], [1, 0]]
    column = {"name": "a", "dtype": "float32", "shape": [2]}
    assert _all(_pipeline(path, schema={"columns": [column]})).inputs.tolist() == [
        [1, 2],
        [3, 4],
        [5, 6],
    ]
    with pytest.raises(DataError, match="'a': expected 3 values, found 2") as caught:
        _all(_pipeline(path, schema={"columns": [{**column, "shape": [3]}]}))
    assert "row 0" in caught.value.where


@given(
    st.lists(st.lists(st.integers(-5, 5), max_size=4), min_size=1, max_size=20),
    st.integers(1, 7),
    st.sampled_from(_KINDS),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_any_rows_of_ragged_lists(tmp_path_factory, lists, rows, kind, data):
    path = tmp_path_factory.mktemp("tables") / f"a.{kind}"
    _write(path, {"n": list(range(len(lists))), "v": pa.array(lists, pa.list_(pa.int64()))}, rows)
    numbers = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=30))
    block = ChunkedRows(_chunks(path), budget=100).take(np.array(numbers), Buffers())
    assert block.columns["n"].tolist() == numbers
    values, offsets = block.columns["v"]
    assert isinstance(block.columns["v"], Ragged)
    found = [values[a:b].tolist() for a, b in pairwise(offsets.tolist())]
    assert found == [lists[number] for number in numbers]


@pytest.mark.parametrize("kind", _KINDS)
def test_shuffled_and_in_order_are_the_same_rows(tmp_path, kind):
    values = np.random.default_rng(0).normal(size=(700, 2)).astype(np.float32)
    table = {"a": values[:, 0], "b": values[:, 1], "y": np.arange(700)}
    _write(tmp_path / f"one.{kind}", pa.table(table).slice(0, 400), 64)
    _write(tmp_path / f"two.{kind}", pa.table(table).slice(400), 100)
    pipeline = _pipeline(tmp_path / f"*.{kind}", target="y", stack=True)
    assert np.array_equal(_all(pipeline).inputs.numpy(), values)
    seen = list(pipeline.shuffle(seed=1).batch(32).batches(0))
    order = torch.cat([batch.targets for batch in seen]).numpy()
    assert sorted(order) == list(range(700))
    assert not np.array_equal(order, np.arange(700))
    assert np.array_equal(torch.cat([batch.inputs for batch in seen]).numpy(), values[order])


def test_only_the_columns_that_are_used_are_read(tmp_path, monkeypatch):
    table = {"a": [1, 2], "b": ["x", "y"], "c": [1.0, 2.0]}
    seen = []
    read = ParquetFile.read

    def watched(self, part, names):
        found = read(self, part, names)
        seen.append(found.column_names)
        return found

    monkeypatch.setattr(ParquetFile, "read", watched)
    pipeline = flatout.data.parquet(_write(tmp_path / "a.parquet", table), inputs="c")
    assert _all(pipeline).inputs.tolist() == [1, 2]
    assert seen == [["c"]]


@pytest.mark.parametrize("packing", [None, "lz4", "zstd"])
def test_arrow_files_that_are_packed(tmp_path, packing):
    table = {"a": np.arange(100), "s": pa.array(["x", "y"] * 50).dictionary_encode()}
    path = _write(tmp_path / "a.arrow", table, 30, compression=packing)
    pipeline = flatout.data.arrow(path, categories={"s": ["x", "y"]})
    batch = _all(pipeline)
    assert batch.inputs["a"].tolist() == list(range(100))
    assert batch.inputs["s"].tolist() == [0, 1] * 50
    assert _chunks(path, categories={"s": ["x", "y"]}).sizes.tolist() == [30, 30, 30, 10]


def test_feather_files(tmp_path):
    table = pa.table({"a": [1, 2]})
    feather.write_feather(table, tmp_path / "a.feather")
    assert _all(flatout.data.arrow(tmp_path / "a.feather")).inputs.tolist() == [1, 2]
    (tmp_path / "old").write_bytes(b"FEA1" + bytes(20) + b"FEA1")
    with pytest.raises(DataError, match="Feather of version 1"):
        flatout.data.arrow(tmp_path / "old")
    with pa.ipc.new_stream(str(tmp_path / "stream"), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="found a stream"):
        flatout.data.arrow(tmp_path / "stream")


@pytest.mark.parametrize("kind", _KINDS)
def test_remote_files(tmp_path, kind):
    content = _write(tmp_path / f"a.{kind}", {"a": [1, 2]}).read_bytes()
    files = fsspec.filesystem("memory")
    files.pipe(f"/tables/a.{kind}", content)
    files.pipe(f"/tables/b.{kind}", content[:-20])
    try:
        assert _all(_pipeline(f"memory://tables/a.{kind}")).inputs.tolist() == [1, 2]
        with pytest.raises(DataError) as caught:
            _pipeline(f"memory://tables/*.{kind}")
        assert f"tables/b.{kind}" in caught.value.where
    finally:
        files.rm("/tables", recursive=True)


@pytest.mark.parametrize("kind", _KINDS)
def test_threads_and_another_process_read_the_same(tmp_path, kind):
    path = _write(tmp_path / f"a.{kind}", {"a": np.arange(5000)}, 100)
    rows = ChunkedRows(_chunks(path), budget=4000)
    orders = [np.random.default_rng(seed).permutation(5000)[:500] for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(lambda order: rows.take(order, Buffers()), orders))
    for order, block in zip(orders, blocks, strict=True):
        assert np.array_equal(block.columns["a"], order)
    other = pickle.loads(pickle.dumps(rows))
    assert other.digest == rows.digest
    assert other.take(np.array([4999, 0]), Buffers()).columns["a"].tolist() == [4999, 0]


@pytest.mark.parametrize("kind", _KINDS)
def test_words_and_places(tmp_path, kind):
    _write(tmp_path / f"a.{kind}", {"a": np.arange(10)}, 4)
    _write(tmp_path / f"b.{kind}", {"a": np.arange(7)}, 5)
    chunks = _chunks(tmp_path / f"*.{kind}")
    part = "row group" if kind == "parquet" else "record batch"
    assert chunks.where(0).endswith(f"a.{kind}: row 0 ({part} 0)")
    assert chunks.where(9).endswith(f"a.{kind}: row 9 ({part} 2)")
    assert chunks.where(15).endswith(f"b.{kind}: row 5 ({part} 1)")
    assert chunks.describe().startswith("2 Parquet files" if kind == "parquet" else "2 Arrow files")
    assert chunks.describe().endswith("17 rows")
    assert chunks.file_rows.tolist() == [0, 10, 17]
    assert chunks.notes() == []
    other = _chunks(tmp_path / f"*.{kind}", target="a")
    assert other.digest != chunks.digest


# ---- what bad input gets ----


_BAD = [
    ([1, None, 3], {}, "expected int64, found a missing value"),
    ([1.0, float("nan"), 3.0], {}, "expected a finite float32, found nan"),
    ([1.0, float("-inf"), 3.0], {}, "expected a finite float32, found -inf"),
    ([1.0, 1e300, 3.0], {}, "expected a finite float32, found 1e"),
    ([1.0, 2.5, 3.0], {"dtype": "int64"}, "expected int64, found 2.5"),
    ([1, 300, 3], {"dtype": "uint8"}, "expected uint8, found 300"),
    ([[1], None, [3]], {}, "expected int64, found a missing value"),
    ([[1], [2, None], [3]], {}, "expected int64, found a missing value"),
    ([[1.0], [2.0, float("nan")], [3.0]], {}, "expected a finite float32, found nan"),
    (["x", "z", "y"], {"categories": ["x", "y"]}, "expected one of 2 categories, found 'z'"),
    ([["x"], ["y", "z"]], {"categories": ["x", "y"]}, "one of 2 categories, found 'z'"),
    (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), {}, "found a missing value"),
    (pa.array([[1, 2], [3, None]], pa.list_(pa.int64(), 2)), {}, "found a missing value"),
    (
        pa.array([[[1, 2]], [None]], pa.list_(pa.list_(pa.int64(), 2), 1)),
        {},
        "expected 2 values, found a missing list",
    ),
    (np.array([1, 2**63], np.uint64), {}, "expected int64, found 9223372036854775808"),
]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(("values", "how", "match"), _BAD)
def test_a_bad_value_is_named(tmp_path, kind, values, how, match):
    first = pa.array(values)
    # The bad value is the second of the second part.
    whole = pa.concat_arrays([first[:1]] * len(first) + [first])
    path = _write(tmp_path / f"a.{kind}", {"n": np.arange(len(whole)), "x": whole}, len(first))
    arguments = {}
    if "dtype" in how:
        arguments["schema"] = {"columns": [{"name": "x", "dtype": how["dtype"]}]}
    if "categories" in how:
        arguments["categories"] = {"x": how["categories"]}
    pipeline = _pipeline(path, **arguments).batch(2)
    with pytest.raises(DataError, match=match) as caught:
        list(pipeline.batches(0))
    assert caught.value.what.startswith("column 'x': ")
    part = "row group" if kind == "parquet" else "record batch"
    assert caught.value.where.endswith(f"a.{kind}: row {len(first) + 1} ({part} 1)")


@pytest.mark.parametrize("kind", _KINDS)
def test_defaults_fill_what_is_missing(tmp_path, kind):
    table = {
        "a": [1, None, 3],
        "b": [None, 0.5, None],
        "f": pa.array([[1, None], None, [5, 6]], pa.list_(pa.int64(), 2)),
        "v": [[1, None], None, []],
        "t": ["x", None, "y"],
        "n": pa.nulls(3, pa.int32()),
    }
    path = _write(tmp_path / f"a.{kind}", table)
    default = {"a": -1, "b": 7, "f": -2, "v": -3, "t": 1, "n": -4}
    pipeline = _pipeline(path, default=default, categories={"t": ["x", "y"]})
    inputs = _all(pipeline).inputs
    assert inputs["a"].tolist() == [1, -1, 3]
    assert inputs["b"].tolist() == [7, 0.5, 7]
    assert inputs["f"].tolist() == [[1, -2], [-2, -2], [5, 6]]
    assert inputs["v"].tolist() == [[1, -3], [0, 0], [0, 0]]
    assert inputs["t"].tolist() == [0, 1, 1]
    assert inputs["n"].tolist() == [-4, -4, -4]
    with pytest.raises(DataError, match="'t': expected int64, found a missing value"):
        _all(_pipeline(path, default=0, categories={"t": ["x", "y"]}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([b"x"], "binary"),
        ([{"a": 1}], "struct"),
        ([[[1]]], "list<"),
        (pa.nulls(1), "missing values alone"),
    ],
)
def test_columns_of_no_numbers_are_refused_with_advice(tmp_path, values, words):
    path = _write(tmp_path / "a.parquet", {"a": [1], "bad": values})
    with pytest.raises(DataError, match="expected columns of numbers, found 'bad'") as caught:
        flatout.data.parquet(path)
    assert words in caught.value.what
    assert "unused=['bad']" in caught.value.do
    assert _all(flatout.data.parquet(path, unused=["bad"])).inputs.tolist() == [1]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary("int8", "string")])
def test_texts_become_learned_categories(tmp_path, kind):
    texts = ["b", "a", None, "b"]
    table = {"t": pa.array(texts, kind), "n": pa.array([1, 2, 3, 4])}
    path = _write(tmp_path / "a.parquet", table, rows=2)
    pipeline = flatout.data.parquet(path, target="n")
    assert _all(pipeline).inputs.tolist() == [2, 1, 0, 2]
    assert pipeline.schema.embedding_rows == {"t": 3}
    other = _write(tmp_path / "b.parquet", {"t": ["z", "a"], "n": [1, 2]})
    again = flatout.data.parquet(other, schema=pipeline.schema)
    assert _all(again).inputs.tolist() == [0, 1]
    numbered = flatout.data.parquet(path, target="t", categories={"t": ["a", "b"]}, default=0)
    with pytest.raises(DataError, match="column 't': expected int64, found a missing value"):
        _all(numbered)
    whole = flatout.data.parquet(path, categories=["n"])  # numbers that name things
    assert _all(whole).inputs["n"].tolist() == [1, 2, 3, 4]
    assert whole.schema.embedding_rows == {"t": 3, "n": 5}


def test_dates_become_days(tmp_path):
    day, at = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 6)
    zone = at.replace(tzinfo=datetime.UTC)
    written = {"day": [day], "at": [at], "zone": [zone], "t": [at.time()], "text": ["02.01.2026"]}
    path = _write(tmp_path / "a.parquet", written)
    pipeline = flatout.data.parquet(path, dates={"text": "%d.%m.%Y"})
    found = {name: days.item() for name, days in _all(pipeline).inputs.items()}
    first = (day - datetime.date(1970, 1, 1)).days
    assert found == {
        "day": first, "at": first + 0.25, "zone": first + 0.25, "t": 0.25, "text": first
    }  # fmt: skip


def test_a_schema_that_does_not_fit(tmp_path):
    path = _write(tmp_path / "a.parquet", {"a": [1], "v": [[1]], "t": ["x"]})
    for column in (
        {"name": "a", "dtype": "bool"},
        {"name": "a", "dtype": "int64", "ragged": True},
        {"name": "a", "dtype": "int64", "shape": [1]},
        {"name": "v", "dtype": "int64"},
        {"name": "v", "dtype": "int64", "shape": [1, 1]},
        {"name": "t", "dtype": "int64"},
    ):
        with pytest.raises(DataError, match=f"column '{column['name']}': expected") as caught:
            flatout.data.parquet(path, schema={"columns": [column]})
        assert caught.value.where.endswith("a.parquet")
    with pytest.raises(DataError, match=r"expected a column 'z', found a, v, t"):
        flatout.data.parquet(path, schema={"columns": [{"name": "z", "dtype": "int64"}]})
    stacked = {
        "columns": [{"name": "inputs", "dtype": "float32", "shape": [3]}],
        "options": {"stack": ["a"]},
    }
    with pytest.raises(DataError, match=r"expected shape \(1,\)"):
        flatout.data.parquet(path, schema=stacked)


def test_categories_of_other_types(tmp_path):
    table = {"n": [30, 10, 20], "v": [["b"], ["a", "b"], []]}
    path = _write(tmp_path / "a.parquet", table)
    batch = _all(flatout.data.parquet(path, categories={"n": [10, 20, 30], "v": ["a", "b"]}))
    assert batch.inputs["n"].tolist() == [2, 0, 1]
    assert batch.inputs["v"].tolist() == [[1, 0], [0, 1], [0, 0]]
    with pytest.raises(DataError, match="categories of column 'n': expected a list of int64"):
        flatout.data.parquet(path, unused="v", categories={"n": ["x"]})
    schema = {"columns": [{"name": "n", "dtype": "int64"}], "options": {"stacks": ["n"]}}
    with pytest.raises(DataError, match="parquet has no option 'stacks'"):
        flatout.data.parquet(path, schema=schema)


def test_stacking_that_cannot_be(tmp_path):
    path = _write(tmp_path / "a.parquet", {"inputs": [[1]], "a": [1], "t": ["x"]})
    with pytest.raises(DataError, match="stack makes a column 'inputs'"):
        flatout.data.parquet(path, stack=True, unused=["t"])
    with pytest.raises(DataError, match="at least one numeric input"):
        flatout.data.parquet(path, stack=True, inputs="t", categories={"t": ["x"]})


@pytest.mark.parametrize("kind", _KINDS)
def test_files_with_different_columns(tmp_path, kind):
    _write(tmp_path / f"a.{kind}", {"a": [1], "b": [2]})
    _write(tmp_path / f"b.{kind}", {"a": pa.array([3.5]), "c": [4]})
    with pytest.raises(DataError, match=r"expected the columns of .*: a, b; found a, c") as caught:
        _pipeline(tmp_path / f"*.{kind}")
    assert caught.value.where.endswith(f"b.{kind}")
    with pytest.raises(DataError, match="expected a column 'b', found a, c"):
        _pipeline(tmp_path / f"*.{kind}", inputs="b")
    both = _pipeline(
        tmp_path / f"*.{kind}", schema={"columns": [{"name": "a", "dtype": "float32"}]}
    )
    assert _all(both).inputs.tolist() == [1, 3.5]


@pytest.mark.parametrize("kind", _KINDS)
def test_no_rows_or_no_columns(tmp_path, kind):
    path = _write(tmp_path / f"a.{kind}", {"a": pa.array([], pa.int64())})
    with pytest.raises(DataError, match="no rows"):
        ChunkedRows(_chunks(path))
    path = _write(tmp_path / f"b.{kind}", pa.table({"": [1]}))
    with pytest.raises(DataError, match="columns with names"):
        _pipeline(path)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(DataError, match="several columns are called a"):
        _pipeline(_write(tmp_path / f"c.{kind}", twice))


@pytest.mark.parametrize("kind", _KINDS)
def test_files_that_are_cut_off_or_something_else(tmp_path, kind):
    whole = _write(tmp_path / f"a.{kind}", {"a": np.arange(10_000)}, 1000).read_bytes()
    bad = [
        b"",
        b"PAR1",
        b"ARROW1\0\0",
        b"hello" * 100,
        whole[:100],
        whole[:-1],
        whole[: -len(whole) // 2],
    ]
    bad.append(whole[:-12] + b"\xff\xff\xff\x7f" + whole[-8:])
    for content in bad:
        (tmp_path / f"a.{kind}").write_bytes(content)
        with pytest.raises(DataError, match="damaged, unfinished or no") as caught:
            _pipeline(tmp_path / f"a.{kind}")
        assert caught.value.where.endswith(f"a.{kind}")


def test_a_corrupt_page_is_found_by_its_checksum(tmp_path):
    values = np.random.default_rng(0).random(30_000)
    path = _write(
        tmp_path / "a.parquet", {"a": values}, 10_000, use_dictionary=False, compression="none"
    )
    place = pq.read_metadata(path).row_group(1).column(0).data_page_offset + 4000
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    pipeline = flatout.data.parquet(path).batch(10_000)
    with pytest.raises(DataError, match=r"row group 1 cannot be decoded: .*CRC") as caught:
        list(pipeline.batches(0))
    assert caught.value.where.endswith("a.parquet")


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_damage_anywhere_is_an_error_or_other_numbers(tmp_path_factory, data):
    kind = data.draw(st.sampled_from(_KINDS))
    path = tmp_path_factory.mktemp("damaged") / f"a.{kind}"
    table = {
        "a": np.arange(40),
        "v": [[i] * (i % 3) for i in range(40)],
        "t": pa.array(["x", "yy"] * 20).dictionary_encode(),
    }
    content = bytearray(_write(path, table, 16).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        rows = ChunkedRows(_chunks(path, categories={"t": ["x", "yy"]}))
        block = rows.take(np.arange(rows.rows), Buffers())
    except DataError:
        return
    assert len(block.columns["a"]) == rows.rows


@pytest.mark.parametrize("kind", _KINDS)
def test_a_file_that_vanishes_shrinks_or_changes(tmp_path, kind):
    path = _write(tmp_path / f"a.{kind}", {"a": np.arange(10_000)}, 1000)
    rows = ChunkedRows(_chunks(path), budget=0)
    rows.take(np.arange(10), Buffers())
    os.truncate(path, 5000)
    with pytest.raises(DataError, match="has changed while it was being read"):
        rows.take(np.arange(5000, 5010), Buffers())
    _write(path, {"a": np.arange(10_000) + 1}, 1000)
    with pytest.raises(DataError, match="has changed while it was being read"):
        rows.take(np.arange(5000, 5010), Buffers())
    path.unlink()
    with pytest.raises(DataError, match="has gone while it was being read"):
        rows.take(np.arange(5000, 5010), Buffers())


def test_row_groups_that_are_too_large_are_noted(tmp_path):
    (file,) = find(_write(tmp_path / "a.parquet", {"a": np.arange(1000)}))
    opened = ParquetFile(file)
    opened.largest = 1 << 30
    (note,) = table_chunks("parquet", [opened], None, ColumnOptions()).notes()
    assert "row_group_size" in note


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_file_that_was_written_again_is_not_taken_from_the_cache(tmp_path, kind):
    numbers = np.random.default_rng(0).permutation(40_000)
    plain = {"compression": "none", "use_dictionary": False} if kind == "parquet" else {}
    for at in (10, 20):  # values in the middle, far from the ends that the digest reads
        numbers[20_000], numbers[20_000 + at] = numbers[20_000 + at], numbers[20_000]
        path = _write(tmp_path / f"a.{kind}", {"n": numbers}, **plain)
        os.utime(path, ns=(at, at))
        cached = _pipeline(path).cache("disk")
        found = torch.cat([batch.inputs for batch in cached.batch(40_000).batches(0)])
        assert found.tolist() == numbers.tolist()


def test_learned_numbers_and_texts_in_lists(tmp_path):
    columns = {
        "n": pa.array([1.5, float("nan"), 0.5, None] * 10),
        "tags": [["u", "v"], ["w", None], None, ["u"]] * 10,
    }
    path = _write(tmp_path / "a.parquet", columns, rows=8)
    found = _pipeline(path, categories=["n", "tags"], default={"tags": 0})
    assert found.schema.options["categories"] == {"n": [0.5, 1.5], "tags": ["u", "v", "w"]}
    inputs = _all(found).inputs
    assert inputs["n"][:4].tolist() == [2, 0, 1, 0]
    assert inputs["tags"][:4].tolist() == [[1, 2], [3, 0], [0, 0], [1, 0]]


@pytest.mark.parametrize("first", ["text", "numbers"])
def test_a_file_that_has_numbers_where_another_has_texts_is_named(tmp_path, first):
    files = {"text": ["u", "v"] * 9, "numbers": [1, 2] * 9}
    paths = [_write(tmp_path / f"{name}.parquet", {"a": files[name]}) for name in files]
    paths = sorted(paths, key=lambda path: path.stem != first)
    with pytest.raises(DataError, match=r"column 'a': expected .*, found ") as told:
        flatout.data.parquet(paths)
    assert os.fspath(told.value.where).endswith(paths[1].name)
