from __future__ import annotations

import contextlib
import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flatout.data.source import as_source
from flatout.data.sources.arrays.idx import idx, idx_split, read
from flatout.errors import DataError
from idx_files import write

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"
_real = pytest.mark.skipif(
    not MNIST.is_dir(), reason="no MNIST at ../shared/data/mnist from the project's root"
)
_DTYPES = ["u1", "i1", "i2", "i4", "f4", "f8"]


@given(
    hnp.arrays(
        st.sampled_from(_DTYPES).map(np.dtype),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
    ),
    st.booleans(),
    st.sampled_from(["<", ">"]),
)
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_read(tmp_path_factory, array, packed, byte_order):
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if packed else "a")
    write(path, array.astype(array.dtype.newbyteorder(byte_order)))
    found = read(path)
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()


def test_gzip_is_recognized_by_content_and_not_by_name(tmp_path):
    write(tmp_path / "a.gz", np.arange(5, dtype=np.uint8))
    (tmp_path / "a.gz").rename(tmp_path / "plain-name")
    assert read(tmp_path / "plain-name").tolist() == [0, 1, 2, 3, 4]


_ARRAY = np.random.default_rng(0).integers(0, 256, (40, 9, 9), np.uint8)
_SIZE = 16 + _ARRAY.size


@settings(deadline=None)
@given(st.integers(4, _SIZE - 1))
def test_a_truncated_file_says_where(tmp_path_factory, size):
    path = tmp_path_factory.mktemp("idx") / "a"
    write(path, _ARRAY)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match="truncated") as error:
        read(path)
    assert error.value.where == f"{path}, byte {size:,}"
    if size >= 16:
        assert f"expected {_ARRAY.size:,} bytes for uint8 of shape (40, 9, 9)" in error.value.what
        assert f"found {size - 16:,}" in error.value.what


def test_a_truncated_gzip_file_counts_what_was_there(tmp_path):
    # Stored, not packed: so it is known how much can be unpacked.
    content = struct.pack(">HBB3I", 0, 8, 3, *_ARRAY.shape) + _ARRAY.tobytes()
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(content, 0)[: 10 + 5 + 1000])
    with pytest.raises(DataError, match="is truncated: expected more of the gzip data") as error:
        read(path)
    assert error.value.where == f"{path}, byte 1,000 of the unpacked data"


@settings(deadline=None)
@given(st.data())
def test_a_flipped_bit_in_a_gzip_file_never_gives_other_values(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("idx") / "a.gz"
    write(path, _ARRAY // 64)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    # Some bits say nothing of the content: gzip's time and system, deflate's padding.
    with contextlib.suppress(DataError):
        assert (read(path) == _ARRAY // 64).all()


def test_a_wrong_checksum_is_said(tmp_path):
    path = tmp_path / "a.gz"
    write(path, _ARRAY)
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"corrupt: CRC check failed 0x\w+ != 0x\w+") as error:
        read(path)
    assert error.value.where == f"{path}, byte {_SIZE:,} of the unpacked data"


def test_more_than_the_header_says(tmp_path):
    for name in ("a", "a.gz"):
        path = tmp_path / name
        content = struct.pack(">HBBI", 0, 8, 1, 3) + b"abcd"
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        with pytest.raises(DataError, match="longer than its header says") as error:
            read(path)
        assert f"{path}, byte 11" in error.value.where


@pytest.mark.parametrize(
    "magic", ["00010801", "00000701", "00000f01", "00000800", "89504e47", "7b227822"]
)
def test_another_format_is_said(tmp_path, magic):
    (tmp_path / "a").write_bytes(bytes.fromhex(magic) + bytes(20))
    with pytest.raises(DataError, match="not an IDX file") as error:
        read(tmp_path / "a")
    assert error.value.where == f"{tmp_path / 'a'}, byte 0"
    assert bytes.fromhex(magic).hex(" ") in error.value.what


@pytest.mark.parametrize("packed", [True, False])
def test_a_header_that_promises_petabytes_costs_no_memory(tmp_path, packed):
    content = struct.pack(">HBB3I", 0, 0x0E, 3, 2**32 - 1, 2**32 - 1, 2**31) + bytes(8)
    (tmp_path / "a").write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataError, match="truncated or its header damaged"):
        read(tmp_path / "a")


def test_a_header_of_impossible_dimensions(tmp_path):
    (tmp_path / "a").write_bytes(struct.pack(">HBB", 0, 8, 200) + bytes(800))
    with pytest.raises(DataError, match="no array can have shape"):
        read(tmp_path / "a")
    with pytest.raises(DataError, match=r"cannot read .*: No such file"):
        read(tmp_path / "b")


def _folder(path, splits, dot="-", packed=False, samples=10):
    path.mkdir(exist_ok=True)
    generator = np.random.default_rng(1)
    for prefix in splits:
        end = ".gz" if packed else ""
        images = generator.integers(0, 256, (samples, 5, 4), np.uint8)
        write(path / f"{prefix}-images{dot}idx3-ubyte{end}", images)
        write(path / f"{prefix}-labels{dot}idx1-ubyte{end}", np.arange(samples, dtype=np.uint8))
    return path


@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_with_the_usual_names(tmp_path, dot, packed):
    folder = _folder(tmp_path / "f", ["train", "t10k"], dot, packed)
    train, test = idx(folder), idx(str(folder), split="test")
    assert train.inputs.shape == (10, 1, 5, 4)
    assert (train.inputs.dtype, train.targets.dtype) == (torch.uint8, torch.int64)
    assert not torch.equal(train.inputs, test.inputs)
    batch = next(as_source(train, batch_size=4).batches(0))
    assert batch.inputs.dtype == torch.float32
    expected = train.inputs[batch.indices].numpy() * np.float32(1 / 255)
    assert batch.inputs.numpy().tobytes() == expected.tobytes()
    both = idx_split(folder)
    assert (both[0].digest, both[1].digest) == (train.digest, test.digest)


def test_a_pair_of_files(tmp_path):
    folder = _folder(tmp_path / "f", ["train"])
    files = (folder / "train-images-idx3-ubyte", str(folder / "train-labels-idx1-ubyte"))
    assert idx(files).digest == idx(folder).digest


def test_a_folder_with_one_pair(tmp_path):
    folder = _folder(tmp_path / "f", ["t10k"])
    with pytest.raises(DataError, match=r"no train pair: .* found only the test pair") as error:
        idx(folder)
    assert "idx_split(folder)" in error.value.do
    train, held_out = idx_split(folder, held_out=3)
    assert train.targets.tolist() == list(range(7))
    assert held_out.targets.tolist() == [7, 8, 9]
    for number in (0, 10):
        with pytest.raises(DataError, match="held_out: expected 1 to 9 of 10 samples"):
            idx_split(folder, held_out=number)


def test_folders_without_a_pair(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").touch()
    for call in (idx, idx_split):
        with pytest.raises(DataError, match="no pair of IDX files"):
            call(tmp_path)
        with pytest.raises(DataError, match="found no folder"):
            call(tmp_path / "absent")
    with pytest.raises(DataError, match="split: expected 'train' or 'test', found 'val'"):
        idx(tmp_path, split="val")


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((3, 4), np.uint8), np.zeros(3, np.uint8), "expected uint8 images"),
        (np.zeros((3, 4, 4), np.float32), np.zeros(3, np.uint8), "expected uint8 images"),
        (np.zeros((3, 4, 4), np.uint8), np.zeros((3, 1), np.uint8), "expected integer labels"),
        (np.zeros((3, 4, 4), np.uint8), np.zeros(3, np.float32), "expected integer labels"),
        (np.zeros((3, 4, 4), np.uint8), np.zeros(4, np.uint8), "differ in length: 3 and 4"),
        (np.zeros((0, 4, 4), np.uint8), np.zeros(0, np.uint8), "the data is empty"),
    ],
)
def test_a_pair_that_is_no_images_and_labels(tmp_path, images, labels, words):
    write(tmp_path / "i", images)
    write(tmp_path / "l", labels)
    with pytest.raises(DataError, match=words):
        idx((tmp_path / "i", tmp_path / "l"))


@_real
def test_real_mnist():
    train, held_out = idx_split(MNIST)
    assert (len(train), len(held_out)) == (8000, 2000)
    assert train.inputs.shape == (8000, 1, 28, 28)
    assert train.labels_range() == held_out.labels_range() == (0, 9)
    assert train.targets[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    pixels = torch.cat([batch.inputs for batch in as_source(train, batch_size=512).batches(0)])
    assert pixels.min() == 0
    assert pixels.max() == 1
    assert pixels.mean().item() == pytest.approx(0.13, abs=0.01)


@_real
def test_real_mnist_damaged(tmp_path):
    for file in MNIST.glob("t10k-*.gz"):
        shutil.copyfile(file, tmp_path / file.name)
    images = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = images.read_bytes()
    images.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match="is truncated: expected more of the gzip data"):
        idx_split(tmp_path)


def test_a_packed_file_that_unpacks_to_far_more_is_refused(tmp_path):
    (tmp_path / "zeros.gz").write_bytes(gzip.compress(bytes(1 << 20)) * 257)
    with pytest.raises(DataError, match="unpacks to more than the ceiling of 268,435,456 bytes"):
        read(tmp_path / "zeros.gz")
