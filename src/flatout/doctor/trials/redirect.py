"""Files copied on write by Python's own functions, where the kernel does not overlay them.

A path that is written to is first copied into the trial's folder and used from there; later reads
of it see the copy, and what was deleted stays deleted. Patched are `open`, the functions of `os` on
paths and what is built on them (pathlib, shutil, tempfile, glob), `sqlite3.connect`, and the native
writers of torch, safetensors and h5py.

Not seen: other native code that opens files by name, subprocesses, functions given `dir_fd`, and
imports of modules that the script itself has written. Where the kernel has Landlock, writes of
these get `Permission denied`; where not, only what Python announces to audit hooks is refused.
"""

from __future__ import annotations

import builtins
import errno
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

Name = Any  # str, bytes or os.PathLike, as the functions of os take them

_AS_THEY_ARE = ("/proc", "/sys", "/dev")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# The functions as they were, for this file's own use.
_native = type("Native", (), {})()
for _name in (
    *("open", "stat", "lstat", "listdir", "scandir", "access", "readlink", "chdir", "getcwd"),
    *("listxattr", "getxattr", "statvfs"),
    *("rename", "replace", "unlink", "rmdir", "mkdir", "link", "symlink"),
    *("truncate", "utime", "chmod", "chown", "setxattr", "removexattr", "mkfifo"),
):
    setattr(_native, _name, getattr(os, _name))


class View:
    """The files as the script is to see them.

    Args:
        folder: of this process in the trial's folder; holds the copies in files/.
        passes: folders that are written to as they are.
    """

    def __init__(self, folder: Path, passes: Sequence[str]) -> None:
        self._files = os.path.realpath(folder / "files")
        self._journal = os.path.join(folder, "gone")
        self._passes = (*_AS_THEY_ARE, *passes)
        self._gone: set[str] = set()
        self._read = 0
        self._parents: dict[str, str] = {}
        os.makedirs(self._files, exist_ok=True)

    def named(self, name: Name) -> str:
        """The absolute path that the script means, links of its folders followed."""
        text = os.fsdecode(name)
        if not os.path.isabs(text):
            text = os.path.join(self.here(), text)
        path = self._without_files(os.path.normpath(text))
        folder, base = os.path.split(path)
        if folder not in self._parents:
            self._parents[folder] = self._without_files(_real(folder))
        return os.path.join(self._parents[folder], base)

    def here(self) -> str:
        """The current folder, as the script knows it."""
        return self._without_files(_native.getcwd())

    def to_read(self, name: Name, follow: bool = True) -> str:
        """Where the file lies: its copy if there is one."""
        path = self.named(name)
        if self._is_passed(path):
            return path
        copy = self._files + path
        if _exists(copy):
            real = _end_of(copy, follow)
            # The script may have made a link to what it has not written.
            return real if self._is_copy(real) else self.to_read(real, follow)
        if self._is_gone(path):
            return copy
        if follow and _is_link(path):
            return self.to_read(_real(path))
        return path

    def to_write(self, name: Name, follow: bool = True, keep: bool = True) -> str:
        """Where to write it: copied there, unless its content need not be kept."""
        path = self.named(name)
        if self._is_passed(path):
            return path
        copy = self._files + path
        if not self._has_parent(path):
            return copy  # the function itself will say so
        self._make_parent(path)
        real = _end_of(copy, follow)
        if not self._is_copy(real):
            return self.to_write(real, follow, keep)
        path = self._without_files(real)
        if _exists(real) or self._is_gone(path) or not _exists(path):
            return real
        if follow and _is_link(path):
            return self.to_write(_real(path), keep=keep)
        self._copy(path, real, keep)
        return real

    def _copy(self, path: str, copy: str, keep: bool) -> None:
        found = _native.lstat(path)
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode):
            _native.mkdir(copy, mode | 0o700)
        elif stat.S_ISLNK(found.st_mode):
            _native.symlink(_native.readlink(path), copy)
        elif stat.S_ISREG(found.st_mode):
            if not _native.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            with _open(copy, "wb") as target:
                if keep:
                    with _open(path, "rb") as source:
                        shutil.copyfileobj(source, target, 1 << 20)
            _native.chmod(copy, mode)
            _native.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))

    def copy_tree(self, name: Name) -> str:
        """A whole folder or file, to be moved: all of it is copied."""
        copy = self.to_write(name, follow=False)
        path = self.named(name)
        if os.path.isdir(copy) and not _is_link(copy) and not self._is_passed(path):
            for child in self.listed(path):
                self.copy_tree(os.path.join(path, child))
        return copy

    def remove(self, name: Name) -> None:
        """Delete a file or link."""
        path = self.named(name)
        copy = self.to_read(path, follow=False)
        if self._is_passed(path) or self._is_copy(copy):
            _native.unlink(copy)
        elif not _exists(path) or (os.path.isdir(path) and not _is_link(path)):
            number = errno.EISDIR if _exists(path) else errno.ENOENT
            raise OSError(number, os.strerror(number), path)
        elif not _native.access(os.path.dirname(path), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        self.forget(path)

    def forget(self, name: Name) -> None:
        """From now on what the user has there is not seen."""
        path = self.named(name)
        if not self._is_passed(path) and _exists(path):
            descriptor = _native.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, os.fsencode(path) + b"\0")
            finally:
                os.close(descriptor)

    def listed(self, name: Name) -> list[str]:
        """Names in a folder: the user's and the copies, without the deleted."""
        path = self.named(name)
        copy = self._files + path
        if self._is_passed(path) or (not _exists(copy) and not self._any_gone()):
            return list(_native.listdir(self.to_read(name)))
        names: dict[str, None] = {}
        if _exists(copy):
            names.update(dict.fromkeys(_native.listdir(copy)))
        if not self._is_gone(path) and _exists(path):
            theirs = _native.listdir(path)
            names.update((one, None) for one in theirs if not self._is_gone(f"{path}/{one}"))
        if not names and not _exists(copy):
            _native.listdir(self.to_read(name))  # raises what there is to say
        return list(names)

    def exists(self, name: Name) -> bool:
        """Whether there is anything of that name, be it a broken link."""
        return _exists(self.to_read(name, follow=False))

    def is_merged(self, name: Name) -> bool:
        """Whether a folder's entries do not all lie in one place."""
        path = self.named(name)
        return not self._is_passed(path) and (_exists(self._files + path) or self._any_gone())

    def _make_parent(self, path: str) -> None:
        missing = []
        folder = os.path.dirname(path)
        while not _exists(self._files + folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for one in reversed(missing):
            with suppress(FileExistsError):
                _native.mkdir(self._files + one)

    def _has_parent(self, path: str) -> bool:
        parent = os.path.dirname(path)
        copy = self._files + parent
        if _exists(copy):
            return os.path.isdir(copy)
        if self._is_gone(parent) or not os.path.isdir(parent):
            return False
        if not _native.access(parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return True

    def _without_files(self, path: str) -> str:
        if path == self._files:
            return "/"
        return path[len(self._files) :] if path.startswith(self._files + "/") else path

    def _is_copy(self, path: str) -> bool:
        return path.startswith(self._files + "/")

    def _is_passed(self, path: str) -> bool:
        if path.startswith("/dev/shm/"):  # files may lie here; shared memory has no Python path
            return False
        return any(path == one or path.startswith(one + "/") for one in self._passes)

    def _any_gone(self) -> bool:
        """Reads what this process or another one of the trial has deleted since."""
        with suppress(FileNotFoundError):
            size = _native.stat(self._journal).st_size
            if size != self._read:
                with _open(self._journal, "rb") as journal:
                    self._gone = set(os.fsdecode(journal.read()).split("\0")) - {""}
                self._read = size
        return bool(self._gone)

    def _is_gone(self, path: str) -> bool:
        if not self._any_gone():
            return False
        while path != "/":
            if path in self._gone:
                return True
            path = os.path.dirname(path)
        return False


class _Entry:
    """What os.scandir gives, of a folder whose entries lie in two places."""

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
    """The iterator and context manager that os.scandir returns."""

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


_open = builtins.open


def install(view: View) -> None:
    """Redirect this process from now on."""
    _patch_open(view)
    _patch_reading(view)
    _patch_changing(view)
    _patch_moving(view)
    _patch_sqlite(view)
    # Or it goes by descriptors of folders, which stand for one of the two places.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, _NativeWriters(view))


def _patch_open(view: View) -> None:
    def opened(file: Name, mode: str = "r", *args: Any, **options: Any) -> Any:
        return _open(_for_mode(view, file, mode), mode, *args, **options)

    def os_open(path: Name, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            if flags & _WRITING:
                path = view.to_write(path, keep=not flags & os.O_TRUNC)
            else:
                path = view.to_read(path)
        found: int = _native.open(path, flags, mode, dir_fd=dir_fd)
        return found

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
        native = getattr(_native, name)

        def read(path: Name = ".", *args: Any, **options: Any) -> Any:
            if isinstance(path, int) or options.get("dir_fd") is not None:
                return native(path, *args, **options)
            follow = options.get("follow_symlinks", name not in ("lstat", "readlink"))
            return native(view.to_read(path, follow), *args, **options)

        return read

    def listdir(path: Name = None) -> Any:
        if isinstance(path, int):
            return _native.listdir(path)
        names = view.listed("." if path is None else path)
        return [os.fsencode(one) for one in names] if isinstance(path, bytes) else names

    def scandir(path: Name = None) -> Any:
        if isinstance(path, int):
            return _native.scandir(path)
        folder = "." if path is None else os.fspath(path)
        if not view.is_merged(folder):
            return _native.scandir(folder)
        return _Entries(_Entry(folder, name) for name in view.listed(folder))

    def getcwdb() -> bytes:
        return os.fsencode(view.here())

    told = ("stat", "lstat", "access", "readlink", "chdir", "listxattr", "getxattr", "statvfs")
    for name in told:
        setattr(os, name, on_read(name))
    os.listdir = listdir
    os.scandir = scandir
    os.getcwd = view.here
    os.getcwdb = getcwdb


def _patch_changing(view: View) -> None:
    def on_change(name: str) -> Callable[..., Any]:
        native = getattr(_native, name)

        def change(path: Name, *args: Any, **options: Any) -> Any:
            if isinstance(path, int) or options.get("dir_fd") is not None:
                return native(path, *args, **options)
            follow = options.get("follow_symlinks", True)
            return native(view.to_write(path, follow), *args, **options)

        return change

    def mkdir(path: Name, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            return _native.mkdir(path, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]
        if view.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        return _native.mkdir(view.to_write(path, follow=False), mode)  # type: ignore[no-any-return]

    def unlink(path: Name, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            return _native.unlink(path, dir_fd=dir_fd)  # type: ignore[no-any-return]
        return view.remove(path)

    def rmdir(path: Name, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:
            return _native.rmdir(path, dir_fd=dir_fd)  # type: ignore[no-any-return]
        if view.listed(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), os.fspath(path))
        _native.rmdir(view.to_write(path, follow=False))
        view.forget(path)
        return None

    for name in ("truncate", "utime", "chmod", "chown", "setxattr", "removexattr", "mkfifo"):
        setattr(os, name, on_change(name))
    os.mkdir = mkdir
    os.unlink = os.remove = unlink
    os.rmdir = rmdir


def _patch_moving(view: View) -> None:
    def on_move(name: str) -> Callable[..., None]:
        native = getattr(_native, name)

        def move(src: Name, dst: Name, **options: Any) -> None:
            if any(one is not None for one in options.values()):
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
        _native.link(view.to_write(src), view.to_write(dst, follow=False), **options)

    def symlink(
        src: Name, dst: Name, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        if dir_fd is not None:
            _native.symlink(src, dst, target_is_directory, dir_fd=dir_fd)
            return
        if view.exists(dst):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(dst))
        beside = os.path.join(os.path.dirname(view.named(dst)), os.fsdecode(src))
        _native.symlink(view.to_read(beside), view.to_write(dst, follow=False), target_is_directory)

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


class _NativeWriters(importlib.abc.MetaPathFinder):
    """Patches modules that open files in native code, when they are imported."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._finding = ""
        self._patches: dict[str, Callable[[ModuleType], None]] = {
            "torch.serialization": self._torch,
            "safetensors": self._safetensors,
            "h5py._hl.files": self._h5py,
        }

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(fullname)
        if patch is None or self._finding == fullname:
            return None
        self._finding = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding = ""
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_patch(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = then_patch  # type: ignore[method-assign]
        return spec

    def _torch(self, module: ModuleType) -> None:
        core = module.torch._C
        core.PyTorchFileWriter = self._on_name(core.PyTorchFileWriter, 0, self._view.to_write)
        core.PyTorchFileReader = self._on_name(core.PyTorchFileReader, 0, self._view.to_read)

    def _safetensors(self, module: ModuleType) -> None:
        where = {"serialize_file": (1, self._view.to_write), "safe_open": (0, self._view.to_read)}
        for name, (place, mapped) in where.items():
            setattr(module, name, self._on_name(getattr(module, name), place, mapped))

    def _h5py(self, module: ModuleType) -> None:
        native = module.make_fid

        def make_fid(name: Name, mode: str, *args: Any, **options: Any) -> Any:
            writes = mode not in ("r", None)
            text = os.fsdecode(name)
            mapped = self._view.to_write(text) if writes else self._view.to_read(text)
            return native(os.fsencode(mapped), mode, *args, **options)

        module.make_fid = make_fid  # type: ignore[attr-defined]

    @staticmethod
    def _on_name(native: Any, place: int, where: Callable[[Name], str]) -> Callable[..., Any]:
        def mapped(*args: Any, **options: Any) -> Any:
            given = list(args)
            if len(given) > place and isinstance(given[place], (str, bytes, os.PathLike)):
                given[place] = where(given[place])
            elif isinstance(options.get("filename"), (str, os.PathLike)):
                options["filename"] = where(options["filename"])
            return native(*given, **options)

        return mapped


def _exists(path: str) -> bool:
    try:
        _native.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(_native.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def _end_of(path: str, follow: bool) -> str:
    """Where a path leads through links, of its last part only if asked."""
    if follow:
        return _real(path)
    folder, name = os.path.split(path)
    return os.path.join(_real(folder), name)


def _real(path: str) -> str:
    """os.path.realpath by the functions as they were."""
    parts = path.split("/")[1:]
    at, followed = "/", 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        one = os.path.join(at, part)
        if _is_link(one) and followed < 40:
            followed += 1
            target = _native.readlink(one)
            parts[:0] = target.split("/")
            at = "/" if target.startswith("/") else at
        else:
            at = one
    return at
