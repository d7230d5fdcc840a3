import os
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
