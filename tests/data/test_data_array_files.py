"""Arrays in npy, npz and HDF5 files."""

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flatout.data
from flatout.errors import DataError

h5py = pytest.importorskip("h5py")

_X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
_Y = np.arange(10) * 7


def _save(path, array):
    np.save(path, array)
    return path


def _all(pipeline):
    (whole,) = list(pipeline.batch(1000).batches(0))
    return whole


def _in_hdf5(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


SAVES = {"npz": np.savez, "packed": np.savez_compressed, "hdf5": _in_hdf5}


@given(
    hnp.arrays(
        st.sampled_from(["?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5),
    ),
    st.sampled_from("CF"),
    st.sampled_from(["<", ">"]),
    st.sampled_from(["npy", *SAVES]),
    st.booleans(),
)
@settings(deadline=None, max_examples=100)
def test_any_array_comes_as_it_was_saved(tmp_path_factory, array, order, byte_order, how, shuffle):
    path = tmp_path_factory.mktemp("arrays") / ("a.h5" if how == "hdf5" else f"a.{how[:3]}")
    stored = np.array(array.astype(array.dtype.newbyteorder(byte_order)), order=order)
    if how == "npy":
        rows = flatout.data.npy(_save(path, stored))
    else:
        path = path.with_suffix(".h5" if how == "hdf5" else ".npz")
        SAVES[how](path, x=stored)
        rows = (flatout.data.hdf5 if how == "hdf5" else flatout.data.npz)(path, "x", None)
    batch = _all(rows.shuffle(seed=3) if shuffle else rows)
    found = batch.inputs.numpy()
    assert found.dtype == array.dtype
    assert found.tobytes() == array[batch.indices.numpy()].tobytes()


@pytest.mark.parametrize("how", SAVES)
def test_inputs_targets_and_weights_by_name(tmp_path, how):
    path = tmp_path / ("a.h5" if how == "hdf5" else "a.npz")
    SAVES[how](path, x=_X, y=_Y, w=np.linspace(0, 1, 10))
    read = flatout.data.hdf5 if how == "hdf5" else flatout.data.npz
    batch = _all(read(path, weight="w"))
    assert np.array_equal(batch.inputs.numpy(), _X)
    assert (batch.targets.tolist(), batch.weight.dtype) == (_Y.tolist(), torch.float64)
    batch = _all(read([path, path], {"image": "x", "also": "y"}, ["y", "w"]))
    assert np.array_equal(batch.inputs["image"].numpy(), np.concatenate([_X, _X]))
    assert batch.inputs["also"].tolist() == batch.targets["y"].tolist() == [*_Y, *_Y]
    with pytest.raises(DataError, match=r"'z', found (x, y, w|w, x, y)") as caught:
        read(path, "z")
    assert caught.value.where.endswith(path.name)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="the file is damaged, cut off"):
        read(path)


def test_several_npy_files_are_parts_of_one_array(tmp_path):
    for at, (a, b) in enumerate(pairwise([0, 3, 4, 4, 10])):
        _save(tmp_path / f"x-{at}.npy", _X[a:b])
        _save(tmp_path / f"y-{at}.npy", _Y[a:b])
    seen = list(
        flatout.data.npy(tmp_path / "x-*.npy", {"a": tmp_path / "y-*.npy"})
        .shuffle(seed=2)
        .batch(4)
        .batches(0)
    )
    order = torch.cat([batch.indices for batch in seen]).numpy()
    assert sorted(order) == list(range(10))
    assert np.array_equal(torch.cat([batch.inputs for batch in seen]).numpy(), _X[order])
    assert torch.cat([batch.targets["a"] for batch in seen]).tolist() == _Y[order].tolist()
    _save(tmp_path / "x-4.npy", _X[:, :1])
    with pytest.raises(DataError, match=r"expected rows of float32 of shape \(2, 3\), as in") as e:
        flatout.data.npy(tmp_path / "x-*.npy")
    assert e.value.where.endswith("x-4.npy")


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_integers_become_signed_ones(tmp_path, dtype):
    wider = {"uint16": torch.int32, "uint32": torch.int64, "uint64": torch.int64}[dtype]
    found = _all(flatout.data.npy(_save(tmp_path / "a.npy", np.array([0, 65_535], dtype)))).inputs
    assert (found.dtype, found.tolist()) == (wider, [0, 65_535])


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_damage_of_the_header_or_the_length_is_an_error(tmp_path_factory, data):
    out = io.BytesIO()
    np.save(out, _X)
    content = bytearray(out.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 127))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    path = tmp_path_factory.mktemp("damaged") / "a.npy"
    path.write_bytes(content)
    try:
        batch = _all(flatout.data.npy(path))
    except DataError:
        return
    assert batch.inputs.nbytes == _X.nbytes


def test_what_holds_no_rows_of_numbers_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=_X)
    bad = {
        "expected an array of numbers, found <U1": np.array(["a"]),
        "no npy file": np.array([None, 1], object),
        "expected a row for each sample": np.float32(1),
        "expected an array of numbers, found ": np.zeros(2, [("a", "f4"), ("b", "i4")]),
    }
    for words, array in bad.items():
        with pytest.raises(DataError, match=words) as caught:
            flatout.data.npy(_save(tmp_path / "bad.npy", array))
        assert caught.value.where.endswith("bad.npy")
    with pytest.raises(DataError, match="found an archive"):
        flatout.data.npy(tmp_path / "a.npz")
    x, y = _save(tmp_path / "x.npy", _X), _save(tmp_path / "y.npy", _Y[:9])
    with pytest.raises(DataError, match="inputs and targets differ in length: 10 and 9"):
        flatout.data.npy(x, y)
