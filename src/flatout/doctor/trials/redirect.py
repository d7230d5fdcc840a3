"""Copies files on write by patched Python functions, if the kernel cannot overlay them.

A file that is written is first copied into the trial's folder and used from there. Later reads see
the copy, and deleted files stay deleted. Patched are `open`, the path functions of `os`, and
functions based on them (pathlib, shutil, tempfile, glob). So are `sqlite3.connect` and the native
writers of torch, safetensors and h5py.

Not redirected are other native code that opens files by name, subprocesses, functions with
`dir_fd`, and imports of modules that the script has written. With Landlock in the kernel, their
writes get `Permission denied`. Without Landlock, only writes with audit events are refused.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any

from flatout.doctor.trials import native_files
from flatout.doctor.trials.native_files import native_open
from flatout.doctor.trials.native_writers import redirect_native
from flatout.doctor.trials.view import Name, View

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def install(view: View) -> None:
    """Redirect files in this process from now on."""
    _patch_open(view)
    _patch_reading(view)
    _patch_changing(view)
    _patch_moving(view)
    _patch_sqlite(view)
    # Otherwise shutil uses folder descriptors, which belong either to the user's files or to the
    # trial's.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.dont_write_bytecode = True
    redirect_native(view)


def _patch_open(view: View) -> None:
    def opened(file: Name, mode: str = "r", *args: Any, **options: Any) -> Any:
        return native_open(_for_mode(view, file, mode), mode, *args, **options)

    def os_open(path: Name, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            if flags & _WRITING:
                path = view.to_write(path, keep=not flags & os.O_TRUNC)
            else:
                path = view.to_read(path)
        result: int = native_files.native.open(path, flags, mode, dir_fd=dir_fd)
        return result

    builtins.open = io.open = opened
    os.open = os_open


def _for_mode(view: View, file: Name, mode: str) -> Name:
    if isinstance(file, int) or not isinstance(mode, str):
        return file
    if any(letter in mode for letter in "wax+"):
        return view.to_write(file, keep="w" not in mode)
    return view.to_read(file)


def _patch_reading(view: View) -> None:
    def on_read(name: str) -> Callable[..., Any]:
        native = getattr(native_files.native, name)

        def read(path: Name = ".", *args: Any, **options: Any) -> Any:
            if isinstance(path, int) or options.get("dir_fd") is not None:
                return native(path, *args, **options)
            follow = options.get("follow_symlinks", name not in ("lstat", "readlink"))
            return native(view.to_read(path, follow), *args, **options)

        return read

    def listdir(path: Name = None) -> Any:
        if isinstance(path, int):
            return native_files.native.listdir(path)
        names = view.listed("." if path is None else path)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(path: Name = None) -> Any:
        if isinstance(path, int):
            return native_files.native.scandir(path)
        folder = "." if path is None else os.fspath(path)
        if not view.is_merged(folder):
            return native_files.native.scandir(folder)
        return _Entries(_Entry(folder, name) for name in view.listed(folder))

    def getcwdb() -> bytes:
        return os.fsencode(view.here())

    names = ("stat", "lstat", "access", "readlink", "chdir", "listxattr", "getxattr", "statvfs")
    for name in names:
        setattr(os, name, on_read(name))
    os.listdir = listdir
    os.scandir = scandir
    os.getcwd = view.here
    os.getcwdb = getcwdb


def _patch_changing(view: View) -> None:
    def on_change(name: str) -> Callable[..., Any]:
        native = getattr(native_files.native, name)

        def change(path: Name, *args: Any, **options: Any) -> Any:
            if isinstance(path, int) or options.get("dir_fd") is not None:
                return native(path, *args, **options)
            follow = options.get("follow_symlinks", True)
            return native(view.to_write(path, follow), *args, **options)

        return change

    def mkdir(path: Name, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            return native_files.native.mkdir(path, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]
        if view.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        return native_files.native.mkdir(view.to_write(path, follow=False), mode)  # type: ignore[no-any-return]

    def unlink(path: Name, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            return native_files.native.unlink(path, dir_fd=dir_fd)  # type: ignore[no-any-return]
        return view.remove(path)

    def rmdir(path: Name, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            return native_files.native.rmdir(path, dir_fd=dir_fd)  # type: ignore[no-any-return]
        if view.listed(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        native_files.native.rmdir(view.to_write(path, follow=False))
        view.forget(path)
        return None

    for name in ("truncate", "utime", "chmod", "chown", "setxattr", "removexattr", "mkfifo"):
        setattr(os, name, on_change(name))
    os.mkdir = mkdir
    os.unlink = os.remove = unlink
    os.rmdir = rmdir


def _patch_moving(view: View) -> None:
    def on_move(name: str) -> Callable[..., None]:
        native = getattr(native_files.native, name)

        def move(src: Name, dst: Name, **options: Any) -> None:
            if any(option is not None for option in options.values()):
                native(src, dst, **options)
                return
            if not view.exists(src):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(src))
            if os.path.isdir(dst) and not os.path.islink(dst) and view.listed(dst):
                number = errno.ENOTEMPTY if os.path.isdir(src) else errno.EISDIR
                raise OSError(number, os.strerror(number), os.fspath(src), None, os.fspath(dst))
            was_folder = os.path.isdir(src)
            native(view.copy_tree(src), view.to_write(dst, follow=False, keep=False))
            view.forget(src)
            if was_folder:
                view.forget(dst)

        return move

    def link(src: Name, dst: Name, **options: Any) -> None:
        native_files.native.link(view.to_write(src), view.to_write(dst, follow=False), **options)

    def symlink(
        src: Name, dst: Name, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        if dir_fd is not None:
            native_files.native.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
            return
        if view.exists(dst):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(dst))
        beside = os.path.join(os.path.dirname(view.named(dst)), os.fsdecode(src))
        native_files.native.symlink(
            view.to_read(beside), view.to_write(dst, follow=False), target_is_directory
        )

    os.rename = on_move("rename")
    os.replace = on_move("replace")
    os.link = link
    os.symlink = symlink


def _patch_sqlite(view: View) -> None:
    native = sqlite3.connect

    def connect(database: Name, *args: Any, **options: Any) -> Any:
        text = os.fsdecode(database)
        if text.startswith("file:") and options.get("uri"):
            path, mark, query = text[5:].partition("?")
            if "mode=memory" not in query and not path.startswith(":memory:"):
                database = f"file:{view.to_write(path)}{mark}{query}"
        elif text not in ("", ":memory:"):
            database = view.to_write(text)
        return native(database, *args, **options)

    sqlite3.connect = sqlite3.dbapi2.connect = connect


class _Entry:
    """Entry of os.scandir, for a folder with entries in the user's and the trial's folder."""

    def __init__(self, folder: Name, name: str) -> None:
        self.name: Any = os.fsencode(name) if isinstance(folder, bytes) else name
        self.path = os.path.join(folder, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def inode(self) -> int:
        return os.lstat(self.path).st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


class _Entries:
    """Iterator and context manager that os.scandir returns."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())
