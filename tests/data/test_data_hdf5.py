"""HDF5 files whose rows are read by number."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flatout.data
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.files import find
from flatout.data.sources.arrays import hdf5
from flatout.data.sources.arrays.hdf5 import HDF5Rows
from flatout.errors import DataError

h5py = pytest.importorskip("h5py")

_X = np.arange(600, dtype=np.float32).reshape(100, 2, 3)
_Y = np.arange(100) * 7
_LAYOUTS = {
    "contiguous": {},
    "chunks": {"chunks": True},
    "packed": {"chunks": True, "compression": "gzip", "shuffle": True, "fletcher32": True},
}


def _write(path, layout="contiguous", **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **_LAYOUTS[layout])
    return path


def _rows(path, inputs="x", targets=None):
    return HDF5Rows(find(path), inputs, targets, None)


def _take(rows, numbers):
    return rows.take(np.array(numbers, np.int64), Buffers())


def _all(pipeline):
    (whole,) = list(pipeline.batch(1000).batches(0))
    return whole


@given(
    hnp.arrays(
        st.sampled_from(["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=7),
    ),
    st.sampled_from(["<", ">"]),
    st.sampled_from(sorted(_LAYOUTS)),
    st.data(),
)
@settings(deadline=None, max_examples=100)
def test_any_rows_in_any_order(tmp_path_factory, array, byte_order, layout, data):
    path = tmp_path_factory.mktemp("hdf5") / "a.h5"
    _write(path, layout, x=array.astype(array.dtype.newbyteorder(byte_order)))
    rows = _rows(path)
    assert rows.random == (layout == "contiguous")
    numbers = data.draw(st.lists(st.integers(0, len(array) - 1), max_size=12))
    found = _take(rows, numbers).columns["x"]
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    assert found.tobytes() == array[np.array(numbers, np.int64)].tobytes()


@pytest.mark.parametrize("held", [False, True])
def test_batches_are_equal_in_memory_and_from_the_file(tmp_path, monkeypatch, held):
    _write(tmp_path / "a.h5", x=_X[:30], y=_Y[:30].astype("u2"))
    _write(tmp_path / "b.h5", "packed", x=_X[30:], y=_Y[30:].astype("u2"))
    monkeypatch.setattr(hdf5, "_MOST_HELD", 1 << 30 if held else 0)
    pipeline = flatout.data.hdf5(tmp_path / "*.h5", ["x"], {"label": "y"})
    seen = list(pipeline.shuffle(seed=2).batch(8).batches(0))
    order = torch.cat([batch.indices for batch in seen]).numpy()
    assert sorted(order) == list(range(100))
    assert np.array_equal(torch.cat([batch.inputs for batch in seen]).numpy(), _X[order])
    targets = torch.cat([batch.targets for batch in seen])
    assert (targets.dtype, targets.tolist()) == (torch.int32, _Y[order].tolist())
    batch = _all(flatout.data.hdf5(tmp_path / "a.h5", {"a": "x", "b": "y"}, None, weight="y"))
    assert sorted(batch.inputs) == ["a", "b"]
    assert batch.weight.tolist() == _Y[:30].tolist()


def test_a_row_is_named_by_its_file(tmp_path):
    _write(tmp_path / "a.h5", x=_X[:30], y=_Y[:30])
    _write(tmp_path / "b.h5", x=_X[30:], y=_Y[30:])
    rows = _rows(tmp_path / "*.h5", targets="y")
    assert rows.where(29).endswith("a.h5: row 29")
    assert rows.where(30).endswith("b.h5: row 0")
    assert rows.describe().startswith("2 HDF5 files, ")
    assert rows.nbytes == _X.nbytes + _Y.nbytes


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
@pytest.mark.parametrize("most_open", [1, 2])  # with 1, threads close each other's files
def test_threads_forks_and_other_processes_read_the_same(tmp_path, monkeypatch, layout, most_open):
    monkeypatch.setattr(hdf5, "_MOST_OPEN", most_open)
    values = np.arange(40_000).reshape(5000, 8)
    _write(tmp_path / "a.h5", layout, x=values[:2000])
    _write(tmp_path / "b.h5", layout, x=values[2000:])
    rows = _rows(tmp_path / "*.h5")
    orders = [np.random.default_rng(seed).permutation(5000)[:800] for seed in range(6)]

    def is_right(order):
        return np.array_equal(_take(rows, order).columns["x"], values[order])

    assert is_right(orders[0])  # so that files are open when processes are forked
    children = []
    for order in orders[:3]:
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if is_right(order) else 3)
            finally:
                os._exit(4)
        children.append(child)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, orders))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    other = pickle.loads(pickle.dumps(rows))
    assert _take(other, [4999, 0]).columns["x"].tolist() == values[[4999, 0]].tolist()
    assert other.digest == rows.digest
    assert _rows(tmp_path / "*.h5", {"z": "x"}).digest != rows.digest


def test_a_file_is_closed_with_its_rows(tmp_path):
    path = _write(tmp_path / "a.h5", x=_X)
    rows = _rows(path)
    _take(rows, [0])
    del rows
    with h5py.File(path, "r+") as file:
        file["more"] = 1


def test_a_damaged_chunk_is_named_by_file_dataset_and_rows(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset(
            "x", data=np.random.default_rng(0).random(1000), chunks=(100,), fletcher32=True
        )
        place = made.id.get_chunk_info(3).byte_offset
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[place + 50] ^= 1
    (tmp_path / "a.h5").write_bytes(content)
    rows = _rows(tmp_path / "a.h5")
    assert len(_take(rows, [0, 999])) == 2
    with pytest.raises(DataError, match="damaged, cut off, packed by an absent filter") as caught:
        _take(rows, [0, 311, 310])
    assert caught.value.where.endswith("a.h5: x, rows 310 to 311")


def test_a_file_that_vanishes_shrinks_or_changes(tmp_path):
    path = _write(tmp_path / "a.h5", x=np.random.default_rng(0).random((20_000, 4)))
    rows = _rows(path)
    _take(rows, [1])
    os.truncate(path, 5000)
    with pytest.raises(DataError, match="has changed while it was being read"):
        _take(rows, [19_999])
    path.unlink()
    with pytest.raises(DataError, match="has gone while it was being read"):
        _take(rows, [19_999])


def test_datasets_that_do_not_fit_are_named(tmp_path):
    path = _write(tmp_path / "a.h5", x=_X, y=_Y[:99], none=np.zeros((0, 3)))
    with h5py.File(path, "a") as file:
        file["text"], file["one"], file["empty"] = ["a", "b"], 5, h5py.Empty("f4")
        file["complex"] = np.array([1j])
    for name, words in {
        "text": "expected an array of numbers",
        "complex": "expected an array of numbers, found complex128",
        "one": "a row for each sample, found one number",
        "empty": "the dataset is empty",
    }.items():
        with pytest.raises(DataError, match=words) as caught:
            _rows(path, name)
        assert caught.value.where.endswith(f"a.h5: {name}")
    with pytest.raises(DataError, match="hold no rows"):
        _rows(path, "none")
    with pytest.raises(DataError, match=r"expected 100 rows, as .*a.h5: x has, found 99") as caught:
        _rows(path, "x", "y")
    assert caught.value.where.endswith("a.h5: y")
    with pytest.raises(DataError, match="'x' is named twice"):
        _rows(path, "x", "x")
    with pytest.raises(DataError, match="at least one input"):
        _rows(path, [], "x")
    _write(tmp_path / "b.h5", x=_X[:, :1])
    with pytest.raises(DataError, match=r"expected rows of .*, as in .*a.h5, found") as caught:
        _rows(tmp_path / "*.h5")
    assert caught.value.where.endswith("b.h5: x")
