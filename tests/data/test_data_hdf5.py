from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flatout.data
from flatout.data import Pipeline
from flatout.data.buffers import Buffers
from flatout.data.chunked import ChunkedRows
from flatout.data.files import find
from flatout.data.sources.hdf5 import HDF5Chunks, hdf5_rows
from flatout.data.sources.mapped import MappedRows
from flatout.errors import DataError

h5py = pytest.importorskip("h5py")

_X = np.arange(600, dtype=np.float32).reshape(100, 2, 3)
_Y = np.arange(100) * 7
# How a dataset may be laid out, and whether its values lie in one piece.
_LAYOUTS = {
    "contiguous": {},
    "chunks": {"chunks": True},
    "packed": {"chunks": True, "compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"chunks": True, "compression": "lzf"},
}


def _write(path, layout="contiguous", **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **_LAYOUTS[layout])
    return path


def _all(pipeline):
    (whole,) = list(pipeline.batch(1000).batches(0))
    return whole


def _rows(path, *arguments, **named):
    found = hdf5_rows(find(path), *arguments, **named)
    return ChunkedRows(found, budget=1000) if isinstance(found, HDF5Chunks) else found


def _take(rows, numbers):
    return rows.take(np.array(numbers, np.int64), Buffers())


# ---- what comes out ----


@given(
    hnp.arrays(
        st.sampled_from(["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=7),
    ),
    st.sampled_from(["<", ">"]),
    st.sampled_from(sorted(_LAYOUTS)),
    st.integers(1, 200),
    st.data(),
)
@settings(deadline=None, max_examples=120)
def test_any_array_in_any_order(tmp_path_factory, array, byte_order, layout, piece, data):
    path = tmp_path_factory.mktemp("hdf5") / "a.h5"
    _write(path, layout, x=array.astype(array.dtype.newbyteorder(byte_order)))
    rows = _rows(path, "x", None, piece_bytes=piece)
    # Booleans are an enumeration in HDF5, of one byte each.
    assert isinstance(rows, MappedRows) == (layout == "contiguous")
    numbers = data.draw(st.lists(st.integers(0, len(array) - 1), max_size=12))
    found = _take(rows, numbers).columns["x"]
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    assert found.tobytes() == array[np.array(numbers, np.int64)].tobytes()


@pytest.mark.parametrize("layout", sorted(_LAYOUTS))
def test_inputs_targets_and_weights(tmp_path, layout):
    path = _write(tmp_path / "a.h5", layout, x=_X, y=_Y, w=np.ones(100), **{"deep/er": _Y + 1})
    batch = _all(flatout.data.hdf5(path))
    assert np.array_equal(batch.inputs.numpy(), _X)
    assert batch.targets.tolist() == _Y.tolist()
    batch = _all(flatout.data.hdf5(path, {"image": "x", "number": "deep/er"}, None, "w"))
    assert np.array_equal(batch.inputs["image"].numpy(), _X)
    assert batch.inputs["number"].tolist() == (_Y + 1).tolist()
    assert batch.targets is None
    assert batch.weight.tolist() == [1] * 100
    batch = _all(flatout.data.hdf5(path, ["x", "deep/er"], ["y"]))
    assert sorted(batch.inputs) == ["deep/er", "x"]
    assert batch.targets.tolist() == _Y.tolist()


@pytest.mark.parametrize("layout", sorted(_LAYOUTS))
def test_several_files_shuffled(tmp_path, layout):
    _write(tmp_path / "a.h5", layout, x=_X[:30], y=_Y[:30])
    _write(tmp_path / "b.h5", "contiguous", x=_X[30:31], y=_Y[30:31])
    _write(tmp_path / "c.h5", layout, x=_X[31:], y=_Y[31:])
    pipeline = Pipeline(hdf5_rows(find(tmp_path / "*.h5"), piece_bytes=100))
    seen = list(pipeline.shuffle(seed=2).batch(8).batches(0))
    order = torch.cat([batch.indices for batch in seen]).numpy()
    assert sorted(order) == list(range(100))
    assert np.array_equal(torch.cat([batch.inputs for batch in seen]).numpy(), _X[order])
    assert np.array_equal(torch.cat([batch.targets for batch in seen]).numpy(), _Y[order])
    rows = _rows(tmp_path / "*.h5")
    assert rows.where(0).endswith("a.h5: row 0")
    assert rows.where(30).endswith("b.h5: row 0")
    assert rows.where(99).endswith("c.h5: row 68")
    assert rows.describe().startswith("3 HDF5 files, ")
    assert rows.describe().endswith(" 100 rows")


def test_pieces_are_whole_chunks_of_the_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((100, 4), np.float32), chunks=(7, 2))
        file.create_dataset("y", data=np.zeros(100), chunks=(5,))
    chunks = hdf5_rows(find(tmp_path / "a.h5"), piece_bytes=24 * 20)
    assert chunks.sizes.tolist() == [14] * 7 + [2]


def test_layouts_whose_values_lie_elsewhere(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = _X
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout((100, 2, 3), np.float32)
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (100, 2, 3))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset(
            "external", data=_X, external=[(str(tmp_path / "raw"), 0, h5py.h5f.UNLIMITED)]
        )
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((100,))
        made = h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_INT16, space, compact)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(100, dtype=np.int16))
        file.create_dataset("unwritten", (100,), np.int32, fillvalue=-5)
    rows = _rows(tmp_path / "a.h5", ["virtual", "external", "compact", "unwritten"], None)
    assert not isinstance(rows, MappedRows)
    block = _take(rows, [99, 5])
    assert np.array_equal(block.columns["virtual"], _X[[99, 5]])
    assert np.array_equal(block.columns["external"], _X[[99, 5]])
    assert block.columns["compact"].tolist() == [99, 5]
    assert block.columns["unwritten"].tolist() == [-5, -5]


def test_a_block_of_the_users_before_the_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file["x"] = _X
    rows = _rows(tmp_path / "a.h5", "x", None)
    assert isinstance(rows, MappedRows)
    assert np.array_equal(_take(rows, range(100)).columns["x"], _X)


def test_numbers_in_a_format_of_their_own_are_converted_by_hdf5(tmp_path):
    bfloat16 = h5py.h5t.IEEE_F32LE.copy()
    bfloat16.set_fields(15, 7, 8, 0, 7)
    bfloat16.set_size(2)
    bfloat16.set_ebias(127)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = h5py.h5d.create(file.id, b"x", bfloat16, h5py.h5s.create_simple((4,)))
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, 2.5, -3e30, 0], np.float32))
    rows = _rows(tmp_path / "a.h5", "x", None)
    assert not isinstance(rows, MappedRows)
    found = _take(rows, [0, 1, 2, 3]).columns["x"]
    assert np.allclose(found.astype(np.float32), [1, 2.5, -3e30, 0], rtol=0.01)


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_a_schema_with_other_dtypes(tmp_path, layout):
    path = _write(tmp_path / "a.h5", layout, x=_X.astype(np.float64), y=_Y.astype(np.uint16))
    first = flatout.data.hdf5(path).schema
    assert first["y"].dtype == "int32"
    text = first.dumps().replace("float64", "float32").replace("int32", "int64")
    (tmp_path / "schema.toml").write_text(text)
    batch = _all(flatout.data.hdf5(path, schema=tmp_path / "schema.toml"))
    assert batch.inputs.dtype == torch.float32
    assert batch.targets.dtype == torch.int64
    assert np.array_equal(batch.inputs.numpy(), _X)
    narrow = {"columns": [{"name": "y", "dtype": "uint8"}]}
    rows = _rows(path, "y", None, schema=narrow)
    with pytest.raises(DataError, match="expected uint8, found 6") as caught:
        _take(rows, range(90, 100))
    assert caught.value.where.endswith("a.h5: y")


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_threads_and_another_process_read_the_same(tmp_path, layout):
    path = _write(tmp_path / "a.h5", layout, x=np.arange(5000))
    rows = _rows(path, "x", None)
    orders = [np.random.default_rng(seed).permutation(5000)[:800] for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(lambda order: _take(rows, order), orders))
    for order, block in zip(orders, blocks, strict=True):
        assert np.array_equal(block.columns["x"], order)
    other = pickle.loads(pickle.dumps(rows))
    assert _take(other, [4999, 0]).columns["x"].tolist() == [4999, 0]
    assert other.digest == rows.digest
    assert _rows(path, {"z": "x"}, None).digest != rows.digest


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_no_file_stays_open(tmp_path, layout):
    path = _write(tmp_path / "a.h5", layout, x=_X)
    before = set(os.listdir("/proc/self/fd"))
    rows = _rows(path, "x", None)
    _take(rows, [0, 99])
    targets = []
    for number in set(os.listdir("/proc/self/fd")) - before:
        try:
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    mapped = [str(path)] if layout == "contiguous" else []  # Python keeps a map's descriptor
    assert [target for target in targets if target.endswith(".h5")] == mapped
    with h5py.File(path, "r+") as file:  # nor does a lock on it
        file["more"] = 1


def test_remote_files(tmp_path):
    content = _write(tmp_path / "a.h5", "packed", x=_X, y=_Y).read_bytes()
    files = fsspec.filesystem("memory")
    files.pipe("/hdf5/a.h5", content)
    try:
        assert np.array_equal(_all(flatout.data.hdf5("memory://hdf5/a.h5")).inputs.numpy(), _X)
        files.pipe("/hdf5/b.h5", content[:-100])
        with pytest.raises(DataError, match="damaged, cut off") as caught:
            flatout.data.hdf5("memory://hdf5/b.h5")
        assert "memory://" in caught.value.where
    finally:
        files.rm("/hdf5", recursive=True)


# ---- what bad input gets ----


def test_a_dataset_that_is_not_there(tmp_path):
    path = _write(tmp_path / "a.h5", x=_X, **{"train/labels": _Y})
    with pytest.raises(DataError, match="expected a dataset 'y', found train/labels, x") as caught:
        flatout.data.hdf5(path)
    assert "targets=..." in caught.value.do
    with pytest.raises(DataError, match="expected a dataset 'train'"):
        flatout.data.hdf5(path, "x", "train")
    with pytest.raises(DataError, match="'x' is named twice"):
        flatout.data.hdf5(path, "x", "x")
    with pytest.raises(DataError, match="at least one input"):
        flatout.data.hdf5(path, [], "x")


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (["a", "b"], "found Python objects"),
        (np.array([b"a", b"bc"]), r"found \|?S2|found bytes"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), "records with the fields a, b"),
        (np.array([1j, 2j]), "found complex128"),
        (5, "a row for each sample, found one number"),
        (h5py.Empty("f4"), "the dataset is empty"),
        (np.zeros((0, 3)), "no rows"),
    ],
)
def test_datasets_of_no_numbers(tmp_path, values, match):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values
    with pytest.raises(DataError, match=match):
        _all(flatout.data.hdf5(tmp_path / "a.h5", "x", None))


def test_lists_of_different_lengths_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", (2,), h5py.vlen_dtype(np.int32))
        made[0], made[1] = [1, 2], [3]
    with pytest.raises(DataError, match="found Python objects"):
        flatout.data.hdf5(tmp_path / "a.h5", "x", None)


def test_lengths_that_differ(tmp_path):
    path = _write(tmp_path / "a.h5", x=_X, y=_Y[:99])
    with pytest.raises(
        DataError, match=r"expected 100 rows, as .*a\.h5: x has, found 99"
    ) as caught:
        flatout.data.hdf5(path)
    assert caught.value.where.endswith("a.h5: y")


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_files_that_are_cut_off_or_something_else(tmp_path, layout):
    path = _write(tmp_path / "a.h5", layout, x=_X, y=_Y)
    whole = path.read_bytes()
    for content in (b"", b"hello" * 100, whole[:100], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="damaged, cut off or no HDF5 file") as caught:
            flatout.data.hdf5(path)
        assert caught.value.where.endswith("a.h5")


def test_a_chunk_whose_checksum_does_not_match(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset(
            "x", data=np.random.default_rng(0).random(1000), chunks=(100,), fletcher32=True
        )
        place = made.id.get_chunk_info(3).byte_offset
    content = bytearray((tmp_path / "a.h5").read_bytes())
    content[place + 50] ^= 1
    (tmp_path / "a.h5").write_bytes(content)
    rows = _rows(tmp_path / "a.h5", "x", None)
    with pytest.raises(DataError, match="damaged, cut off, or packed by a filter") as caught:
        _take(rows, [0])
    assert "a.h5: x, rows 0 to 999" in caught.value.where


@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_a_file_that_vanishes_shrinks_or_changes(tmp_path, layout):
    values = np.random.default_rng(0).random((20_000, 4))
    path = _write(tmp_path / "a.h5", layout, x=values)
    rows = _rows(path, "x", None, piece_bytes=1)
    _take(rows, [1])
    os.truncate(path, 5000)  # touching what is gone of a map would end the process
    with pytest.raises(DataError, match="has changed while it was being read"):
        _take(rows, [19_999])
    path.unlink()
    with pytest.raises(DataError, match="has gone while it was being read"):
        _take(rows, [19_999])


def test_without_h5py_it_says_what_to_install(tmp_path):
    path = _write(tmp_path / "a.h5", x=_X)
    code = f"""
import sys
sys.modules["h5py"] = None
import flatout.data
from flatout.errors import DataError
try:
    flatout.data.hdf5({str(path)!r})
except DataError as error:
    assert "h5py" in error.what, error
    assert error.do == "pip install 'flatout[hdf5]'", error.do
else:
    raise SystemExit("it read without h5py")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
