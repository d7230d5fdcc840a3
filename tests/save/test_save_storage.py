import errno
import os
import resource
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.errors import CheckpointError
from flatout.save import unfinished
from flatout.save.storage import Folder, fill_local


@pytest.fixture(params=["path", "file://", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "path":
        return str(tmp_path / "new" / "folder")
    if request.param == "file://":
        return f"file://{tmp_path}/new/folder"
    return f"memory://{uuid.uuid4().hex}/folder"


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may grow beyond 64 KiB; SIGXFSZ is ignored by Python, so writing fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    yield 65_536
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_comes_back_with_its_size_and_checksum(url: str) -> None:
    folder = Folder(url)
    assert folder.list() == []
    assert not folder.exists("a/b.bin")
    data = os.urandom(9 << 20)  # more than one piece
    written = folder.write_whole("a/b.bin", [data[:10], memoryview(data)[10:]])
    assert folder.read("a/b.bin") == data
    assert folder.size("a/b.bin") == written.size == len(data)
    command = [
        sys.executable,
        "-c",
        "import hashlib,sys;print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())",
    ]
    digest = subprocess.run(command, input=data, capture_output=True, check=True).stdout.decode()
    assert written.sha256 == digest.strip()
    assert folder.list() == ["a"]
    assert folder.child("a").list() == ["b.bin"]
    assert folder.is_folder("a")
    assert not folder.is_folder("a/b.bin")


def test_writing_again_replaces_and_removing_removes(url: str) -> None:
    folder = Folder(url)
    folder.write_whole("x", [b"old"])
    folder.write_whole("x", [b"new one"])
    assert folder.read("x") == b"new one"
    folder.write_whole("d/y", [b""])
    folder.remove("d")
    folder.remove("absent")
    assert folder.list() == ["x"]


def test_parent_and_child_are_inverse(url: str) -> None:
    folder, name = Folder(url).child("deep").child("model.safetensors").parent()
    assert name == "model.safetensors"
    folder.write_whole(name, [b"1"])
    assert Folder(url).read(f"deep/{name}") == b"1"
    assert Folder(folder.where()).read(name) == b"1"


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write_whole("x", [b"old"])
    with pytest.raises(TypeError):
        folder.write_whole("x", [b"new", 3])  # type: ignore[list-item]
    assert folder.read("x") == b"old"
    assert folder.list() == ["x"]


def test_file_size_limit(tmp_path: Path, small_files: int) -> None:
    folder = Folder(tmp_path)
    folder.write_whole("x", [b"old"])
    with pytest.raises(CheckpointError) as caught:
        folder.write_whole("x", [bytes(small_files * 2)])
    assert f"{small_files * 2:,} bytes needed" in caught.value.what
    assert "bytes free" in caught.value.what
    assert "ulimit -f" in str(caught.value.do)
    assert str(tmp_path) in str(caught.value.where)
    assert folder.list() == ["x"]
    assert folder.read("x") == b"old"


def test_a_full_device_is_an_error_at_the_latest_when_the_file_is_flushed() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        fill_local("/dev/full", iter([b"few bytes"]))
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.root
def test_full_disk() -> None:
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
        try:
            folder = Folder(place)
            folder.write_whole("x", [b"old"])
            with pytest.raises(CheckpointError) as caught:
                folder.write_whole("x", [bytes(3 << 20)])
            assert "3,145,728 bytes needed" in caught.value.what
            assert "bytes free" in caught.value.what
            assert "save.keep_last" in str(caught.value.do)
            assert folder.list() == ["x"]
            assert folder.read("x") == b"old"
        finally:
            subprocess.run(["umount", place], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="Permission denied") as caught:
            Folder(tmp_path).write_whole("x", [b"1"])
        assert "may write" in str(caught.value.do)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    folder = Folder(tmp_path / "file" / "run")
    assert folder.list() == []
    assert folder.size("x") is None
    with pytest.raises(CheckpointError, match="a file is where a folder should be"):
        folder.write_whole("x", [b"1"])
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_what_is_not_there_is_named(url: str) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        Folder(url).read("absent")


@pytest.mark.parametrize("url", ["nonsense://x/y", "dropbox://x"])
def test_a_store_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened"):
        Folder(url)


def test_renaming_a_folder_never_replaces_one(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("old/x", [b"1"])
    folder.write("taken/x", [b"2"])
    folder.write("file", [b"3"])
    assert not folder.rename_folder("old", "taken")
    assert not folder.rename_folder("old", "file")
    assert folder.make_folder("empty")
    assert not folder.make_folder("empty")
    assert folder.rename_folder("old", "empty")
    assert folder.read("empty/x") == b"1"
    assert folder.read("taken/x") == b"2"
    folder.remove_if_empty("empty")
    assert folder.list() == ["empty", "file", "taken"]


def test_what_dead_writers_left_is_removed_and_what_living_ones_write_is_not(
    tmp_path: Path,
) -> None:
    program = "from flatout.save import unfinished; print(unfinished.new_name())"
    dead = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout.strip()
    mine = unfinished.new_name()
    elsewhere = dead.replace(dead.split("-")[1], "another.host")
    foreign = [".tmp-note", "tmp", ".tmp-1", f"{dead}x"]
    folder = Folder(tmp_path)
    for name in [dead, mine, elsewhere, *foreign]:
        folder.write(f"{name}/x", [b"1"])
    folder.remove_abandoned()
    assert folder.list() == sorted([mine, elsewhere, *foreign])
