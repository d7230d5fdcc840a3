import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from flatout.atomic_file import atomic_write


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_write(path) as file:
        file.write("né")
        assert path.read_text() == "old"
    assert path.read_bytes() == "né".encode()
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_write(path, "wb", durable=True) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_durable_file_is_flushed_before_it_is_renamed_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *given, call=call, name=name: (calls.append(name), call(*given))[1]
        )
    with atomic_write(tmp_path / "a") as file:
        file.write("a")
    assert calls == ["replace"]
    with atomic_write(tmp_path / "b", durable=True) as file:
        file.write("b")
    assert calls[1:] == ["fsync", "replace", "fsync"]


def test_a_draft_has_the_given_name_and_the_openers_rights(tmp_path: Path) -> None:
    opener = lambda path, flags: os.open(path, flags, 0o600)  # noqa: E731
    with atomic_write(tmp_path / "a", opener=opener, draft=".a.part"):
        assert os.listdir(tmp_path) == [".a.part"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "a.html").symlink_to(tmp_path / "kept")
    with atomic_write(tmp_path / "a.html") as file:
        file.write("page")
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "a.html").read_text() == "page"
    assert not (tmp_path / "a.html").is_symlink()


def test_no_link_at_a_known_name_is_followed(tmp_path: Path) -> None:
    (tmp_path / ".draft").symlink_to(tmp_path / "kept")
    with pytest.raises(OSError, match="symbolic link"):
        atomic_write(tmp_path / "a", draft=".draft").__enter__()
    assert not (tmp_path / "kept").exists()


def test_a_device_or_an_open_file_is_written_into(tmp_path: Path) -> None:
    with atomic_write("/dev/null", "wb") as file:
        file.write(b"gone")
    assert Path("/dev/null").is_char_device()
    reader, writer = os.pipe()
    with atomic_write(f"/dev/fd/{writer}") as file:
        file.write("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    os.close(writer)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a device")
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
def test_root_replaces_no_device_node(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "node"
    try:
        os.mknod(
            path, kind | 0o600, os.makedev(1, 3) if kind == stat.S_IFCHR else os.makedev(7, 99)
        )
    except OSError:
        pytest.skip("devices cannot be made here")
    before = path.stat()
    with suppress(OSError), atomic_write(path) as file:
        file.write("text")
    after = path.stat()
    assert (before.st_mode, before.st_rdev) == (after.st_mode, after.st_rdev)
    assert os.listdir(tmp_path) == ["node"]
