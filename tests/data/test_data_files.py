import bz2
import gzip
import lzma
import os
import socket
from pathlib import Path

import fsspec
import pytest
import zstandard

import flatout
from flatout.cache_folder import MARK, cache_folder, kind_folder
from flatout.data.reading import files
from flatout.data.sources.records.libsvm import libsvm
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
    assert len(list((tmp_path / "cache" / "files").glob(f"*.svm.{kind}"))) == 1
    (whole,) = files.find(packed, unpack=False)
    assert read(whole) == packed.read_bytes()
    os.utime(packed, ns=(1, 1))  # written again
    assert files.find(packed)[0].path != file.path


def test_a_copy_that_another_process_was_quicker_with_stays(tmp_path, monkeypatch):
    path = tmp_path / "a.svm.gz"
    path.write_bytes(gzip.compress(b"1 1:2\n"))
    others, fsync = [], os.fsync

    def another_is_quicker(number):
        fsync(number)
        if not others:
            others.append(None)
            others[:] = files.find(path)

    monkeypatch.setattr(os, "fsync", another_is_quicker)
    assert files.find(path) == others
    others[0].check_unchanged()
    assert not list(Path(others[0].path).parent.glob("*.part"))


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


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_named_and_never_waited_for(tmp_path, kind):
    path = tmp_path / "a_fifo"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
    else:
        path = "/dev/zero"
    with pytest.raises(DataError, match=f"expected a file, found a {kind}"):
        libsvm(str(path))


def test_what_unpacks_to_far_more_than_data_do_is_refused(tmp_path):
    path = str(tmp_path / "zeros.svm.gz")
    Path(path).write_bytes(gzip.compress(bytes(1 << 20)) * 257)
    with pytest.raises(DataError, match="unpacks to more than 268,435,456 bytes") as found:
        libsvm(path)
    assert f"flatout.data.unpack({path!r}, most=BYTES)" in str(found.value)
    assert not [one for one in (cache_folder() / "files").glob("*") if "zeros" in one.name]
    with gzip.open(path, "wb") as packed:
        packed.write(b"0 1:1\n" * 700_000)
    with pytest.raises(DataError, match="more than 4,000,000 bytes"):
        flatout.data.unpack(path, most=4_000_000)
    (unpacked,) = flatout.data.unpack(path, most=4_200_000)
    assert os.path.getsize(unpacked) == 4_200_000
    assert libsvm(path).batch(7).samples == 700_000


def test_copies_and_indexes_are_for_their_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    old = os.umask(0)
    try:
        with gzip.open(tmp_path / "a.svm.gz", "wb") as packed:
            packed.write(b"0 1:1\n1 2:1\n")
        for path in (tmp_path / "cache" / "files", tmp_path / "cache" / "index"):
            kind_folder(path.name)
            path.chmod(0o755)  # as an earlier version made it
        list(libsvm(str(tmp_path / "a.svm.gz")).batch(1).cache("disk").batches(0))
    finally:
        os.umask(old)
    inside = sorted((tmp_path / "cache").rglob("*"))
    assert {path.parent.name for path in inside if path.is_file()} >= {"files", "index"}
    assert "rows.bin" in {path.name for path in inside}
    modes = {str(path): oct(path.stat().st_mode & 0o777) for path in inside}
    assert modes == {str(path): oct(0o700 if path.is_dir() else 0o600) for path in inside}
