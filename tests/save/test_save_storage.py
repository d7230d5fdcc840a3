import errno
import gc
import os
import resource
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from flatout import unfinished
from flatout.errors import CheckpointError
from flatout.save.checkpoint import Checkpoints
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


def test_a_folder_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    try:
        with pytest.raises(CheckpointError, match="Permission denied") as caught:
            Folder(tmp_path).write_whole("x", [b"1"])
        assert "may read and write" in str(caught.value.do)
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


class ObjectFile(AbstractBufferedFile):  # type: ignore[misc]
    """Like the files of s3fs and gcsfs: sent in parts, visible once the last part was sent."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.full:
            raise StoreError("quota exceeded")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.objects[self.path][start:end])


class StoreError(Exception):
    """Stores raise their own types."""


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """Objects by name, folders only as parts of names; listings are cached, as s3fs does."""

    protocol = "objects"
    objects: dict[str, bytes]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.objects, self.full = {}, False

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> ObjectFile:
        if mode == "rb" and path not in self.objects:
            raise FileNotFoundError(path)
        return ObjectFile(self, path, mode, block_size=1 << 20)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = self.dircache.get(path)
        if found is None:
            found = [self._entry(path, name) for name in self.objects if self._is_in(name, path)]
            found = list({entry["name"]: entry for entry in found}.values())
            if not found:
                raise FileNotFoundError(path)
            self.dircache[path] = found
        return found if detail else [entry["name"] for entry in found]

    def _is_in(self, name: str, path: str) -> bool:
        return name == path or name.startswith(f"{path}/")

    def _entry(self, path: str, name: str) -> dict[str, Any]:
        first = path if name == path else f"{path}/{name[len(path) + 1 :].split('/')[0]}"
        kind = "file" if first == name else "directory"
        size = len(self.objects[name]) if kind == "file" else 0
        return {"name": first, "type": kind, "size": size}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def _rm(self, path: str) -> None:
        self.objects.pop(path, None)


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    ObjectStore.clear_instance_cache()
    yield fsspec.filesystem("objects")
    ObjectStore.clear_instance_cache()


def test_a_failed_upload_leaves_the_old_object(store: ObjectStore) -> None:
    folder = Folder("objects://bucket/run")
    folder.write_whole("x", [b"old"])
    store.full = True
    for size in (10, 3 << 20):  # fails when it is closed, fails in the middle
        with pytest.raises(CheckpointError, match="quota exceeded") as caught:
            folder.write_whole("x", [bytes(size)])
        assert f"{size:,} bytes needed" in caught.value.what
        assert "objects://bucket/run/x" in str(caught.value.where)
    store.full = False
    gc.collect()  # a file that is forgotten must not be uploaded after all
    assert store.objects == {"bucket/run/x": b"old"}


def test_checkpoints_in_an_object_store(store: ObjectStore) -> None:
    url = "objects://bucket/run"
    checkpoints = Checkpoints(url, keep_last=2)
    reader = Checkpoints(url)
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": torch.full((1 << 19,), float(step))}, {"step": step})
        checkpoints.wait()
        assert reader.load().state == {"step": step}
    assert Folder(url).list() == ["step-000000002", "step-000000003"]
    store.full = True
    with pytest.raises(CheckpointError, match="quota exceeded"):
        checkpoints.save(4, {"w": torch.zeros(3)})
    store.full = False
    assert reader.load().model["w"][0] == 3
    assert len(store.objects) == 8


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
    program = "from flatout import unfinished; print(unfinished.new_name())"
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
