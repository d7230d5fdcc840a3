import bz2
import gzip
import lzma
import os

import fsspec
import pytest
import zstandard

from flatout.cache_folder import MARK
from flatout.data import files
from flatout.errors import DataError

CONTENT = b"1 1:0.5\n0 2:1\n" * 1000
PACKERS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def read(file):
    with open(file.path, "rb") as opened:
        return opened.read()


def test_patterns_folders_and_lists_come_sorted(tmp_path):
    for name in ("b.svm", "a.svm", "c.txt", ".hidden", "_SUCCESS"):
        (tmp_path / name).write_bytes(name.encode())
    found = files.find(tmp_path / "*.svm")
    assert [read(file) for file in found] == [b"a.svm", b"b.svm"]
    assert [read(file) for file in files.find(tmp_path)] == [b"a.svm", b"b.svm", b"c.txt"]
    both = files.find([tmp_path / "c.txt", tmp_path / "a.svm"])
    assert [read(file) for file in both] == [b"c.txt", b"a.svm"]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "d.svm").write_bytes(b"d.svm")
    assert len(files.find(f"{tmp_path}/**/*.svm")) == 3


def test_a_name_with_the_signs_of_a_pattern_is_found(tmp_path):
    (tmp_path / "day[1].svm").write_bytes(CONTENT)
    assert read(files.find(tmp_path / "day[1].svm")[0]) == CONTENT


def test_names_are_as_people_write_them(tmp_path, monkeypatch):
    (tmp_path / "a.svm").write_bytes(CONTENT)
    monkeypatch.chdir(tmp_path)
    assert files.find("a.svm")[0].name == "a.svm"


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ("absent.svm", "there is no file"),
        ("*.svm", "no file matches the pattern"),
        ("empty", "holds no files"),
        ([], "found an empty list"),
        ("nostore://x/y", "cannot be opened"),
    ],
)
def test_nothing_there_is_named(tmp_path, monkeypatch, paths, words):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words):
        files.find(paths)


@pytest.mark.parametrize("kind", PACKERS)
def test_packed_files_are_unpacked_once(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    packed = tmp_path / f"a.svm.{kind}"
    packed.write_bytes(PACKERS[kind](CONTENT))
    (file,) = files.find(packed)
    assert read(file) == CONTENT
    assert files.find(packed) == [file]
    assert len(list((tmp_path / "cache" / "files").glob("*.svm.*"))) == 1
    (whole,) = files.find(packed, unpack=False)
    assert read(whole) == packed.read_bytes()
    os.utime(packed, ns=(1, 1))  # written anew
    assert files.find(packed)[0].path != file.path


def test_a_packed_file_that_ends_early_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    packed = tmp_path / "a.svm.gz"
    packed.write_bytes(gzip.compress(os.urandom(100_000))[:-2000])
    with pytest.raises(DataError, match="ends early"):
        files.find(packed)
    assert os.listdir(tmp_path / "cache" / "files") == [MARK]


def test_a_packed_file_with_other_bytes_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    packed = bytearray(gzip.compress(CONTENT))
    packed[-6] ^= 1
    (tmp_path / "a.gz").write_bytes(packed)
    with pytest.raises(DataError, match="CRC check failed"):
        files.find(tmp_path / "a.gz")


def test_what_lies_elsewhere_is_brought_here(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.pipe("/far/b.svm.gz", gzip.compress(CONTENT))
    memory.pipe("/far/a.svm", b"0 1:1\n")
    found = files.find("memory://far/*")
    assert [read(file) for file in found] == [b"0 1:1\n", CONTENT]
    assert found[0].name == "memory:///far/a.svm"
    memory.rm("/far", recursive=True)


def test_a_copy_that_has_no_room_is_refused_with_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT))
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: _Usage())
    with pytest.raises(DataError, match=r"a copy needs .* bytes, but 10 are free"):
        files.find(tmp_path / "a.gz")


class _Usage:
    free = 10


def test_a_file_that_changes_is_named(tmp_path):
    path = tmp_path / "a.svm"
    path.write_bytes(CONTENT)
    (file,) = files.find(path)
    file.check_unchanged()
    with open(path, "ab") as opened:
        opened.write(b"more")
    with pytest.raises(DataError, match="it had 14,000 bytes, now 14,004"):
        file.check_unchanged()
    path.unlink()
    with pytest.raises(DataError, match="has gone"):
        file.check_unchanged()
