from __future__ import annotations

import io
import os
import pickle
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flatout.data
from flatout.data.buffers import Buffers
from flatout.data.sources.npy import npy_rows, npz, npz_rows
from flatout.errors import DataError

_X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
_Y = np.arange(10) * 7


def _save(path, array):
    np.save(path, array)
    return path


def _all(pipeline):
    (whole,) = list(pipeline.batch(1000).batches(0))
    return whole


def _take(rows, numbers):
    return rows.take(np.array(numbers, np.int64), Buffers())


# ---- what comes out ----


@given(
    hnp.arrays(
        st.sampled_from(["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5),
    ),
    st.booleans(),
    st.sampled_from(["<", ">"]),
    st.sampled_from(["npy", "stored", "packed"]),
    st.data(),
)
@settings(deadline=None, max_examples=150)
def test_any_array_in_any_order(tmp_path_factory, array, fortran, byte_order, how, data):
    path = tmp_path_factory.mktemp("npy") / "a"
    stored = np.array(array.astype(array.dtype.newbyteorder(byte_order)), order="CF"[fortran])
    with open(path, "wb") as file:
        save = {"npy": np.save, "stored": np.savez, "packed": np.savez_compressed}[how]
        save(file, *[stored] if how == "npy" else [], **{} if how == "npy" else {"x": stored})
    rows = npy_rows(path) if how == "npy" else npz_rows(path, "x", None)
    numbers = data.draw(st.lists(st.integers(0, len(array) - 1), max_size=12))
    (found,) = _take(rows, numbers).columns.values()
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    assert found.flags.writeable
    assert found.tobytes() == array[np.array(numbers, np.int64)].tobytes()


def test_inputs_targets_and_weights(tmp_path):
    x, y = _save(tmp_path / "x.npy", _X), _save(tmp_path / "y.npy", _Y)
    w = _save(tmp_path / "w.npy", np.linspace(0, 1, 10))
    batch = _all(flatout.data.npy(x, y, w))
    assert np.array_equal(batch.inputs.numpy(), _X)
    assert batch.targets.tolist() == _Y.tolist()
    assert batch.weight.dtype == torch.float64
    batch = _all(flatout.data.npy(x))
    assert batch.targets is None
    assert batch.weight is None


def test_several_inputs_and_targets_by_name(tmp_path):
    x, y = _save(tmp_path / "x.npy", _X), _save(tmp_path / "y.npy", _Y)
    pipeline = flatout.data.npy({"image": x, "also": y}, {"a": y, "b": x})
    batch = _all(pipeline)
    assert np.array_equal(batch.inputs["image"].numpy(), _X)
    assert batch.inputs["also"].tolist() == batch.targets["a"].tolist() == _Y.tolist()
    with pytest.raises(DataError, match="'a' is named twice"):
        flatout.data.npy({"a": x}, {"a": y})


@pytest.mark.parametrize("pattern", [True, False])
def test_several_files_are_parts_of_one_array(tmp_path, pattern):
    cuts = [0, 3, 4, 4, 10]
    for at, (a, b) in enumerate(pairwise(cuts)):
        _save(tmp_path / f"x-{at}.npy", _X[a:b])
        _save(tmp_path / f"y-{at}.npy", _Y[a:b])
    xs, ys = tmp_path / "x-*.npy", tmp_path / "y-*.npy"
    if not pattern:
        xs, ys = (sorted(tmp_path.glob(paths.name)) for paths in (xs, ys))
    pipeline = flatout.data.npy(xs, ys)
    assert np.array_equal(_all(pipeline).inputs.numpy(), _X)
    seen = list(pipeline.shuffle(seed=2).batch(4).batches(0))
    order = torch.cat([batch.indices for batch in seen]).numpy()
    assert sorted(order) == list(range(10))
    assert np.array_equal(torch.cat([batch.inputs for batch in seen]).numpy(), _X[order])
    rows = npy_rows(xs, ys)
    assert rows.targets().tolist() == _Y.tolist()
    assert rows.file_rows.tolist() == cuts
    assert rows.where(3).endswith("x-1.npy: row 0")
    assert rows.where(9).endswith("x-3.npy: row 5")
    assert rows.describe() == "8 npy files, 1.3 kB, 10 rows"


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_integers_become_signed_ones(tmp_path, dtype):
    wider = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}[dtype]
    path = _save(tmp_path / "a.npy", np.array([0, 65_535], dtype))
    found = _all(flatout.data.npy(path)).inputs
    assert found.dtype == wider
    assert found.tolist() == [0, 65_535]


def test_a_whole_number_that_is_too_large(tmp_path):
    path = _save(tmp_path / "a.npy", np.array([1, 2**63], np.uint64))
    rows = npy_rows(path)
    assert _take(rows, [0]).columns["inputs"].tolist() == [1]
    with pytest.raises(DataError, match="expected int64, found 9223372036854775808") as caught:
        _take(rows, [0, 1])
    assert caught.value.where.endswith("a.npy")


def test_a_schema_with_other_dtypes(tmp_path):
    x = _save(tmp_path / "x.npy", _X.astype(np.float64))
    y = _save(tmp_path / "y.npy", _Y.astype(np.int32))
    first = flatout.data.npy(x, y).schema
    first.dump(tmp_path / "schema.toml")
    text = (tmp_path / "schema.toml").read_text()
    assert "float64" in text
    (tmp_path / "schema.toml").write_text(
        text.replace("float64", "float32").replace("int32", "int64")
    )
    batch = _all(flatout.data.npy(x, y, schema=tmp_path / "schema.toml"))
    assert batch.inputs.dtype == torch.float32
    assert batch.targets.dtype == torch.int64
    assert np.array_equal(batch.inputs.numpy(), _X)
    for change, match in (
        ({"dtype": "int64"}, "expected inputs int64 x2 x3, found float64"),
        ({"shape": [6]}, r"found shape \(2, 3\)"),
        ({"name": "images"}, "the schema has the columns images"),
    ):
        column = {"name": "inputs", "dtype": "float32", "shape": [2, 3], **change}
        with pytest.raises(DataError, match=match):
            flatout.data.npy(x, schema={"columns": [column]})


def test_targets_are_known_without_reading_rows(tmp_path):
    x, y = _save(tmp_path / "x.npy", _X), _save(tmp_path / "y.npy", (_Y % 3).astype(np.uint16))
    assert npy_rows(x).targets() is None
    assert npy_rows(y, x).targets() is None
    assert npy_rows(x, y).targets().dtype == np.int32
    assert flatout.data.npy(x, y).labels_range() == (0, 2)


def test_what_is_given_is_no_view_of_the_file(tmp_path):
    path = _save(tmp_path / "x.npy", _X)
    rows = npy_rows(path)
    _take(rows, range(10)).columns["inputs"][...] = -1
    assert np.array_equal(_take(rows, range(10)).columns["inputs"], _X)
    assert np.array_equal(np.load(path), _X)


def test_packed_and_remote_files(tmp_path):
    import gzip

    out = io.BytesIO()
    np.save(out, _X)
    files = fsspec.filesystem("memory")
    files.pipe("/arrays/x.npy.gz", gzip.compress(out.getvalue()))
    files.pipe("/arrays/bad.npy", out.getvalue()[:-1])
    try:
        found = _all(flatout.data.npy("memory://arrays/x.npy.gz")).inputs
        assert np.array_equal(found.numpy(), _X)
        with pytest.raises(DataError, match="cut off") as caught:
            flatout.data.npy("memory://arrays/bad.npy")
        assert "memory://" in caught.value.where
    finally:
        files.rm("/arrays", recursive=True)


def test_threads_and_another_process_read_the_same(tmp_path):
    path = _save(tmp_path / "x.npy", np.arange(5000))
    rows = npy_rows(path)
    orders = [np.random.default_rng(seed).permutation(5000) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for order, block in zip(orders, pool.map(lambda o: _take(rows, o), orders), strict=True):
            assert np.array_equal(block.columns["inputs"], order)
    content = pickle.dumps(rows)
    assert len(content) < 5000  # the array is not in it
    other = pickle.loads(content)
    assert _take(other, [4999, 0]).columns["inputs"].tolist() == [4999, 0]
    assert other.digest == rows.digest
    assert npy_rows(path, path).digest != rows.digest


def test_many_files_do_not_use_up_the_descriptors(tmp_path):
    for at in range(300):
        _save(tmp_path / f"x-{at:03}.npy", _X + at)
    rows = npy_rows(tmp_path / "*.npy")
    found = _take(rows, np.random.default_rng(0).permutation(3000))
    assert np.array_equal(
        found.columns["inputs"], np.concatenate([_X + i for i in range(300)])[found.numbers]
    )
    places = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = [os.readlink(place) for place in places if os.path.lexists(place)]
    assert sum(file.startswith(str(tmp_path)) for file in files) == 256


def test_rows_that_are_not_there(tmp_path):
    rows = npy_rows(_save(tmp_path / "x.npy", _X))
    for numbers in ([10], [-1]):
        with pytest.raises(IndexError, match="from 0 to 9"):
            _take(rows, numbers)


# ---- archives ----


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives(tmp_path, save):
    save(tmp_path / "a.npz", x=_X, y=_Y, w=np.ones(10))
    rows = npz_rows(tmp_path / "a.npz", weight="w")
    block = _take(rows, [3, 9])
    assert np.array_equal(block.columns["x"], _X[[3, 9]])
    assert block.columns["y"].tolist() == [21, 63]
    assert rows.targets().tolist() == _Y.tolist()
    assert bool(rows.notes()) == (save is np.savez_compressed)
    batch = _all(npz(tmp_path / "a.npz", {"image": "x"}, ["y", "w"]))
    assert np.array_equal(batch.inputs.numpy(), _X)
    assert sorted(batch.targets) == ["w", "y"]
    other = pickle.loads(pickle.dumps(rows))
    assert np.array_equal(_take(other, [3]).columns["x"], _X[[3]])


def test_an_archive_without_the_array(tmp_path):
    np.savez(tmp_path / "a.npz", _X, labels=_Y)
    with pytest.raises(DataError, match="expected an array 'x', found labels, arr_0") as caught:
        npz(tmp_path / "a.npz")
    assert "targets=..." in caught.value.do
    with pytest.raises(DataError, match="found an archive") as caught:
        flatout.data.npy(tmp_path / "a.npz")
    assert "npz" in caught.value.do


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_archives(tmp_path, save):
    path = tmp_path / "a.npz"
    save(path, x=np.random.default_rng(0).normal(size=(100, 10)))
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[:50], whole[:-30], whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="damaged, cut off or no npz archive") as caught:
            npz(path, "x", None)
        assert caught.value.where.endswith("a.npz")


def test_every_flipped_byte_of_a_stored_array_is_found(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=_X, y=_Y)
    whole = path.read_bytes()
    begin = whole.index(_X.tobytes())
    for at in range(begin, begin + _X.nbytes):
        content = bytearray(whole)
        content[at] ^= 1 << at % 8
        path.write_bytes(content)
        rows = npz_rows(path)
        assert rows.targets() is not None  # y is not damaged
        for _ in range(2):
            with pytest.raises(DataError, match=r"CRC-32 is .*, and the archive says") as caught:
                _take(rows, [0])
            assert caught.value.where == f"{path}: x"


def test_a_packed_array_whose_checksum_does_not_match(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(1000, 10)))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    rows = npz_rows(path, "x", None)
    with pytest.raises(DataError, match="cannot be unpacked") as caught:
        _take(rows, [0])
    assert caught.value.where.endswith("a.npz: x")


# ---- what bad input gets ----


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.array([{}, None]), "found Python objects"),
        (np.array(["a", "b"]), "found <U1"),
        (np.array([1j]), "found complex128"),
        (np.array(["2026-01-01"], "M8[D]"), r"found datetime64\[D\]"),
        (np.zeros(3, [("a", "i4"), ("b", "f4")]), "records with the fields a, b"),
        (np.zeros(3, [("\u0431", "i4")]), "records with the fields "),
        (np.array([1.5], np.longdouble), "found float128|found longdouble"),
        (np.array(5), "a row for each sample, found one number"),
        (np.zeros((0, 3)), "hold no rows"),
        (np.zeros((3, 0)), r"found shape \(3, 0\)"),
    ],
)
def test_arrays_of_no_numbers(tmp_path, array, match):
    path = tmp_path / "a.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(DataError, match=match) as caught:
        flatout.data.npy(path)
    assert caught.value.where.endswith("a.npy")
    np.savez(tmp_path / "a.npz", x=array)
    with pytest.raises(DataError, match=match):
        npz(tmp_path / "a.npz", "x", None)


def test_pickles_are_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.save(tmp_path / "a.npy", np.array([Trap()]), allow_pickle=True)
    np.savez_compressed(tmp_path / "a.npz", x=np.array([Trap()]))
    with pytest.raises(DataError, match="Python objects"):
        flatout.data.npy(tmp_path / "a.npy")
    with pytest.raises(DataError, match="Python objects"):
        npz(tmp_path / "a.npz", "x", None)
    assert not (tmp_path / "sprung").exists()


def test_files_that_are_cut_off_or_too_long(tmp_path):
    path = _save(tmp_path / "a.npy", _X)
    whole = path.read_bytes()
    for content, match in (
        (b"", "empty, damaged or no npy file"),
        (b"hello world", "empty, damaged or no npy file"),
        (whole[:60], "empty, damaged or no npy file"),
        (whole[:-1], r"cut off: expected 240 bytes for float32 of shape \(10, 2, 3\), found 239"),
        (whole + b"x", "longer than its header says: expected 240 bytes .* found 241"),
        (whole.replace(b"(10, 2, 3)", b"(-1, 2, 3)"), "damaged or"),
        (whole.replace(b"(10, 2, 3)", b"(10, 2, x)"), "empty, damaged or no npy file"),
        (whole.replace(b"(10, 2, 3)", b"(99, 2, 3)"), "expected 2,376 bytes"),
        (whole.replace(b"<f4", b"<q4"), "empty, damaged or no npy file"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=match) as caught:
            flatout.data.npy(path)
        assert caught.value.where.endswith("a.npy")


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_damage_anywhere_is_an_error_if_the_file_has_checksums(tmp_path_factory, data):
    out = io.BytesIO()
    archive = data.draw(st.booleans())
    if archive:
        np.savez(out, x=_X, y=_Y)
    else:
        np.save(out, _X)
    content = bytearray(out.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "a"
    path.write_bytes(content)
    try:
        rows = npz_rows(path) if archive else npy_rows(path)
        block = _take(rows, range(rows.rows))
    except DataError:
        return
    assert len(block) == rows.rows
    if archive:  # CRC-32 detects every change of a few bits
        assert block.columns["x"].tobytes() == _X.tobytes()
        assert block.columns["y"].tobytes() == _Y.tobytes()


def test_lengths_and_counts_that_differ(tmp_path):
    x, y = _save(tmp_path / "x.npy", _X), _save(tmp_path / "y.npy", _Y[:9])
    with pytest.raises(DataError, match=r"expected 10 rows, as .*x\.npy has, found 9") as caught:
        flatout.data.npy(x, y)
    assert caught.value.where.endswith("y.npy")
    with pytest.raises(DataError, match="as many files of each, found 2 of inputs, 1 of targets"):
        flatout.data.npy([x, x], y)
    other = _save(tmp_path / "z.npy", _X[:, :1])
    with pytest.raises(DataError, match=r"expected rows of inputs float32 x2 x3, found shape"):
        flatout.data.npy([x, other])
    with pytest.raises(DataError, match="expected a number a row"):
        flatout.data.npy(x, weight=x)


def test_fortran_order_is_noted(tmp_path):
    path = _save(tmp_path / "a.npy", np.asfortranarray(_X))
    rows = npy_rows(path)
    assert np.array_equal(_take(rows, [2, 1]).columns["inputs"], _X[[2, 1]])
    assert "Fortran order" in rows.notes()[0]
    assert npy_rows(_save(tmp_path / "b.npy", _X)).notes() == []


def test_a_file_that_vanishes_shrinks_or_changes(tmp_path):
    path = _save(tmp_path / "a.npy", np.zeros((100_000, 4)))
    rows = npy_rows(path)
    _take(rows, [1])
    os.truncate(path, 5000)  # touching what is gone would end the process
    with pytest.raises(DataError, match="has changed while it was being read"):
        _take(rows, [99_999])
    path.unlink()
    with pytest.raises(DataError, match="has gone while it was being read"):
        _take(rows, [99_999])


def test_a_zip_that_is_no_archive_of_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", b"no array")
    with pytest.raises(DataError, match="damaged or no npy file") as caught:
        npz(tmp_path / "a.npz", "x", None)
    assert caught.value.where.endswith("a.npz: x")


def test_an_archive_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.data.files._ALWAYS_UNPACKED", 1 << 20)
    path = str(tmp_path / "zeros.npz")
    np.savez_compressed(path, x=np.zeros((1000, 1000)), y=np.zeros(1000))
    with pytest.raises(DataError, match="unpacks to 8,000,128 bytes, more than the ceiling"):
        npz(path)
    assert npz(path, most=8_000_128).batch(1).samples == 1000
