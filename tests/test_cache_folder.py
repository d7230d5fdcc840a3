"""Cache folders: no folder is used in which another user could put files."""

import json
import os
import stat
import tempfile

import pytest

from flatout import cache_folder as subject
from flatout.cache_folder import cache_folder, hindrance, keep_text, kept_text, kind_folder

IS_ROOT = os.geteuid() == 0
OTHER = 12345


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A cache folder, with another temporary folder as its replacement."""
    (tmp_path / "temporary").mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "above" / "cache"))
    (tmp_path / "above").mkdir(mode=0o700)
    return tmp_path / "above" / "cache"


def test_a_folder_of_this_user_is_used_before_and_after_it_exists(own):
    assert hindrance(own) == ""
    assert kind_folder("auto") == own / "auto"
    assert hindrance(own) == ""
    assert cache_folder() == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(own, mode, capfd):
    own.mkdir()
    own.chmod(mode)
    assert "other users can write" in hindrance(own)
    used = kind_folder("steps")
    assert own not in used.parents
    assert not list(own.iterdir())
    assert f"{own} is not used" in capfd.readouterr().err


def test_a_folder_below_one_that_others_can_write_is_not_used(own):
    own.mkdir()
    own.parent.chmod(0o777)
    assert str(own.parent) in hindrance(own)
    own.parent.chmod(0o1777)  # like /tmp: other users can add names, and remove only their own
    assert hindrance(own) == ""


def test_a_group_of_others_counts_as_others(own, monkeypatch):
    own.mkdir()
    own.chmod(0o770)
    monkeypatch.setattr(subject, "_is_own_group", lambda number: False)
    assert "other users can write" in hindrance(own)
    monkeypatch.setattr(subject, "_is_own_group", lambda number: True)
    assert hindrance(own) == ""


def test_a_link_is_as_safe_as_all_folders_on_its_path(own, tmp_path):
    shared, real = tmp_path / "shared", tmp_path / "shared" / "real"
    real.mkdir(parents=True)
    (tmp_path / "middle").symlink_to(real)
    own.symlink_to(tmp_path / "middle")
    assert hindrance(own) == ""
    shared.chmod(0o777)
    assert str(shared) in hindrance(own)


def test_a_loop_of_links_is_no_folder(own, tmp_path):
    own.symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(own)
    assert hindrance(own)
    assert own not in cache_folder().parents


@pytest.mark.skipif(not IS_ROOT, reason="gives a folder to another user")
@pytest.mark.parametrize("part", ["cache", "above", "a link"])
def test_a_folder_of_another_user_is_not_used(own, tmp_path, part):
    if part == "a link":
        (tmp_path / "elsewhere").mkdir()
        own.symlink_to(tmp_path / "elsewhere")
        os.lchown(own, OTHER, OTHER)
    else:
        own.mkdir()
        os.chown(own if part == "cache" else own.parent, OTHER, OTHER)
    assert "belongs to another user" in hindrance(own)


@pytest.mark.skipif(not IS_ROOT, reason="gives a folder to another user")
def test_a_kind_of_another_user_within_an_own_folder_is_neither_read_nor_written(own):
    keep_text("auto", "a", "kept")
    assert kept_text("auto", "a") == "kept"
    os.chown(own / "auto", OTHER, OTHER)
    assert kept_text("auto", "a") is None
    with pytest.raises(PermissionError, match="belongs to another user"):
        kind_folder("auto")
    os.chown(own / "auto", 0, 0)
    os.chown(own / "auto" / "a", OTHER, OTHER)
    assert kept_text("auto", "a") is None


def test_without_a_usable_folder_nothing_is_kept_and_only_oserror_is_raised(own, tmp_path):
    own.parent.chmod(0o777)
    (tmp_path / "temporary").chmod(0o777)
    (tmp_path / "temporary" / f"flatout-{os.geteuid()}").write_text("in the way")
    assert not cache_folder().exists()
    assert kept_text("auto", "a") is None
    with pytest.raises(OSError, match="director"):
        keep_text("auto", "a", "text")


def test_a_text_comes_back_only_as_it_was_written(own):
    text = '{"ä": 1}\r\nsecond\n'
    keep_text("auto", "a", text)
    assert kept_text("auto", "a") == text
    path = own / "auto" / "a"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert kept_text("auto", "a") is None
    path.write_bytes(data[:-3])
    assert kept_text("auto", "a") is None


@pytest.mark.skipif(not IS_ROOT, reason="becomes another user")
def test_a_home_that_cannot_be_searched_is_replaced_by_a_temporary_folder():
    # Directly below /tmp, because only root can enter the folders of pytest.
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o1777)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.environ.pop("FLATOUT_CACHE")
            os.environ["HOME"], tempfile.tempdir = home, temporary
            keep_text("auto", "a", "text")
            answer = [str(cache_folder()), kept_text("auto", "a")]
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        with open(reader) as told:
            folder, text = json.loads(told.read())
        assert folder == f"{temporary}/flatout-{OTHER}"
        assert text == "text"
