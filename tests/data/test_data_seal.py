import gzip
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flatout
from flatout.data import checksums
from flatout.data.checksums import Checksums, Verified
from flatout.data.sources import npy as npy_source
from flatout.errors import DataError
from flatout.kernels.example import crc32c_blocks

ROWS = 300


def made(folder, kind):
    """A file of rows and how it is opened."""
    draws = np.random.default_rng(0)
    x, y = draws.random((ROWS, 5), np.float32), draws.integers(0, 2, ROWS)
    path = str(folder / f"made.{kind}")
    if kind == "npy":
        np.save(path, x)
        return path, lambda: flatout.data.npy(path)
    if kind == "npz":
        np.savez(path, x=x, y=y)
        return path, lambda: flatout.data.npz(path)
    if kind in ("h5", "chunked.h5"):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x, chunks=(40, 5) if "chunked" in kind else None)
            file["y"] = y
        return path, lambda: flatout.data.hdf5(path)
    if kind == "csv":
        rows = "".join(f"{a!r},{b}\n" for a, b in zip(x[:, 0].tolist(), y, strict=True))
        (folder / "made.csv").write_text("a,label\n" + rows)
        return path, lambda: flatout.data.csv(path, target="label")
    rows = zip(x[:, 0].tolist(), x[:, 1].tolist(), y, strict=True)
    (folder / f"made.{kind}").write_text("".join(f"{c} 1:{a} 2:{b}\n" for a, b, c in rows))
    return path, lambda: flatout.data.libsvm(path)


def read(opened):
    return list(opened().shuffle(seed=1).batch(32).batches(0))


KINDS = ["npy", "npz", "h5", "chunked.h5", "csv", "svm"]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 20), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_told(tmp_path, monkeypatch, kind, held, at, bit):
    if not held:  # rows of text are read from the file as they are wanted
        monkeypatch.setattr("flatout.data.indexed._HELD", 0.0)
    monkeypatch.setattr(checksums, "BLOCK", 256)
    path, opened = made(tmp_path, kind)
    flatout.data.seal(path)
    assert len(read(opened)) == 10
    with open(path, "rb+") as file:
        whole = file.read()
        at %= len(whole)
        file.seek(at)
        file.write(bytes([whole[at] ^ 1 << bit]))
    with pytest.raises(DataError) as found:
        read(opened)
    assert f"made.{kind}" in str(found.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_value_is_named_by_its_block(tmp_path, kind):
    path, opened = made(tmp_path, kind)
    flatout.data.seal(path)
    size, now = os.path.getsize(path), os.stat(path)
    with open(path, "rb+") as file:
        file.seek(size // 2)
        byte = file.read(1)
        file.seek(size // 2)
        file.write(b"1" if byte == b"2" else b"2")
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))
    with pytest.raises(DataError, match=rf"block 0, bytes 0 to {size - 1:,}\n.*is damaged") as told:
        read(opened)
    assert "checksum differs" in str(told.value)
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns + 10**9))
    with pytest.raises(DataError, match=r"written after it was sealed .*flatout data seal"):
        read(opened)
    flatout.data.seal(path)  # it was meant
    if kind not in ("svm", "npz"):  # a row that is damaged; a checksum of the archive's own
        read(opened)


def test_a_file_of_another_size_than_when_it_was_sealed_is_told(tmp_path):
    path, opened = made(tmp_path, "svm")
    (sealed,) = flatout.data.seal(path)
    assert (sealed.bytes, os.path.exists(path + ".seal")) == (os.path.getsize(path), True)
    with open(path, "a") as file:
        file.write("1 1:1\n")
    with pytest.raises(DataError, match=r"has changed since it was sealed .*: it had") as found:
        read(opened)
    assert "flatout data seal" in str(found.value)
    flatout.data.seal(path)
    assert opened().batch(1).samples == ROWS + 1


def test_a_copy_that_is_newer_than_its_seal_is_read(tmp_path):
    path, opened = made(tmp_path, "npy")
    flatout.data.seal(path)
    later = time.time_ns() + 10**9
    os.utime(path, ns=(later, later))
    assert len(read(opened)) == 10


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 20), st.integers(0, 7))
def test_a_damaged_seal_is_told(tmp_path, at, bit):
    path, opened = made(tmp_path, "npy")
    flatout.data.seal(path)
    with open(path + ".seal", "rb+") as file:
        whole = file.read()
        at %= len(whole)
        file.seek(at)
        file.write(bytes([whole[at] ^ 1 << bit]))
    with pytest.raises(DataError, match=r"the seal cannot be read: .*\n.*made\.npy\.seal"):
        read(opened)


def test_only_what_is_read_is_compared_and_once_in_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK", 256)
    path, _ = made(tmp_path, "npy")
    flatout.data.seal(path)
    compared = []
    plain = checksums.crc32c_blocks
    monkeypatch.setattr(
        checksums, "crc32c_blocks", lambda data, n: compared.append(len(data)) or plain(data, n)
    )
    rows = npy_source.npy_rows(path)
    assert sum(compared) == 256  # its header
    taken = rows.take(np.array([100]), flatout_buffers())
    assert taken.columns["inputs"].shape == (1, 5)
    assert sum(compared) == 512
    again = pickle.loads(pickle.dumps(rows))
    for one in (rows, again, npy_source.npy_rows(path)):
        one.take(np.array([100]), flatout_buffers())
    assert sum(compared) == 512
    again.take(np.arange(ROWS), flatout_buffers())
    assert sum(compared) == os.path.getsize(path)


def flatout_buffers():
    from flatout.data.buffers import Buffers

    return Buffers()


class Racing(np.ndarray):
    """Marks in which another thread marks the first missing block just after it was found."""

    def argmin(self):
        at = super().argmin()
        self.view(np.ndarray)[at] = 1
        return at


def test_a_block_that_another_thread_compares_meanwhile_does_not_end_the_comparison(tmp_path):
    content = np.zeros(1024, np.uint8)
    sums = Checksums(len(content), 256, crc32c_blocks(content, 256))
    verified = Verified(str(tmp_path), sums, (str(tmp_path), len(content), 1), "")
    verified._marks = verified._marks.view(Racing)
    compared = []

    def read(start, stop):
        compared.append((start, stop))
        return content[start:stop]

    verified.check(np.array([0]), np.array([1]), read)  # the other thread compares the second
    verified.check(np.array([512]), np.array([513]), read)
    assert compared == [(0, 256), (512, 768)]


@pytest.mark.parametrize("threads", [1, 4])
def test_the_blocks_of_any_ranges_are_compared_once_by_all_threads(tmp_path, threads):
    draws = np.random.default_rng(threads)
    content = draws.integers(0, 256, 100_001, np.uint8)
    blocks = -(-len(content) // 256)
    sums = Checksums(len(content), 256, crc32c_blocks(content, 256))
    path = str(tmp_path / "a")
    verified = Verified(path, sums, (path, len(content), 1), "")
    compared = []

    def read(start, stop):
        compared.extend(range(start // 256, -(-stop // 256)))
        return content[start:stop]

    def look(seed):
        draw, wanted = np.random.default_rng(seed), set()
        for longest in (1, 300, 5_000) * 5:
            starts = draw.integers(0, len(content), 7)
            stops = np.minimum(starts + draw.integers(1, longest + 1, 7), len(content))
            verified.check(starts, stops, read)
            for start, stop in zip(starts // 256, (stops - 1) // 256, strict=True):
                wanted |= set(range(int(start), int(stop) + 1))
            assert wanted <= set(compared)
        return wanted

    with ThreadPoolExecutor(threads) as pool:
        wanted = set().union(*pool.map(look, range(threads)))
    assert sorted(compared) == sorted(wanted)
    assert verified.done == (len(wanted) == blocks)
    verified.check_all(read)
    assert sorted(compared) == list(range(blocks))
    assert verified.done
    content[70_000] ^= 1
    with pytest.raises(DataError, match="checksum differs"):
        Verified(path, sums, (path, len(content), 2), "").check_all(read)


def test_unpacked_copies_are_sealed_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    path, _ = made(tmp_path, "svm")
    with open(path, "rb") as plain, gzip.open(path + ".gz", "wb") as packed:
        packed.write(plain.read())
    opened = lambda: flatout.data.libsvm(path + ".gz")  # noqa: E731
    read(opened)
    (copy,) = (tmp_path / "cache" / "files").glob("*.gz")
    with open(copy, "rb+") as file:
        file.seek(1000)
        file.write(b"x")
    with pytest.raises(DataError, match=r"checksum differs|changed") as told:
        read(opened)
    assert told.value.do == f"delete the copy, and it is made again: {copy}"
    copy.unlink()
    read(opened)


def test_seals_are_no_data(tmp_path):
    path, _ = made(tmp_path, "svm")
    flatout.data.seal(path)
    for paths in (str(tmp_path), str(tmp_path / "*")):
        assert flatout.data.libsvm(paths).batch(1).samples == ROWS


def test_what_compares_no_seals_is_not_sealed(tmp_path):
    path, _ = made(tmp_path, "svm")
    with open(path, "rb") as plain, gzip.open(path + ".gz", "wb") as packed:
        packed.write(plain.read())
    with pytest.raises(DataError, match="is copied into the cache, and sealed there"):
        flatout.data.seal(path + ".gz")
    with pytest.raises(DataError, match="files of parquet are not compared with seals"):
        flatout.data.seal(path, format="parquet")


def test_inspect_says_what_is_compared(tmp_path):
    path, _ = made(tmp_path, "svm")
    unseen = "the bytes are compared with no checksums, so a change would not be noticed"
    assert f"{unseen}: flatout data seal writes checksums" in flatout.data.inspect(path).notes
    flatout.data.seal(path)
    notes = flatout.data.inspect(path).notes
    assert "the bytes are compared with their seals as they are read" in notes
    flatout.data.convert(path, tmp_path / "made.rows")
    notes = flatout.data.inspect(tmp_path / "made.rows").notes
    assert "the folder's bytes are compared with its checksums as they are read" in notes
