"""The file tree that a redirected script sees.

It consists of the user's files, copies of files that the script has written, and new files, without
the deleted files.

    FOLDER/files/<absolute path>    a copy, or a new file
    FOLDER/gone                     paths deleted, moved, or made again, separated by zero bytes
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatout.doctor.trials.native_files import end_of, exists, is_link, native, native_open, real

Name = Any  # str, bytes or os.PathLike, as the functions of os accept them

_AS_THEY_ARE = ("/proc", "/sys", "/dev")


class View:
    """The file tree that the script sees."""

    def __init__(self, folder: Path, passes: Sequence[str]) -> None:
        self._files = os.path.realpath(folder / "files")
        self._journal = os.path.join(folder, "gone")
        self._passes = (*_AS_THEY_ARE, *passes)
        self._gone: set[str] = set()
        self._read = 0
        self._parents: dict[str, str] = {}
        os.makedirs(self._files, exist_ok=True)

    def named(self, name: Name) -> str:
        """Return the absolute path that the script means, with links in its folder resolved."""
        text = os.fsdecode(name)
        if not os.path.isabs(text):
            text = os.path.join(self.here(), text)
        path = self._without_files(os.path.normpath(text))
        folder, base = os.path.split(path)
        if folder not in self._parents:
            self._parents[folder] = self._without_files(real(folder))
        return os.path.join(self._parents[folder], base)

    def here(self) -> str:
        """Return the current folder, as the script knows it."""
        return self._without_files(native.getcwd())

    def to_read(self, name: Name, follow: bool = True) -> str:
        """Return the path where a file is stored: its copy if a copy exists."""
        path = self.named(name)
        if self._is_passed(path):
            return path
        copy = self._files + path
        if exists(copy):
            end = end_of(copy, follow)
            # The script may have made a link to a file that has no copy.
            return end if self._is_copy(end) else self.to_read(end, follow)
        if self._is_gone(path):
            return copy
        if follow and is_link(path):
            return self.to_read(real(path))
        return path

    def to_write(self, name: Name, follow: bool = True, keep: bool = True) -> str:
        """Return the path to write a file to, after copying it there if `keep`."""
        path = self.named(name)
        if self._is_passed(path):
            return path
        copy = self._files + path
        if not self._has_parent(path):
            return copy  # the calling function raises the error
        self._make_parent(path)
        end = end_of(copy, follow)
        if not self._is_copy(end):
            return self.to_write(end, follow, keep)
        path = self._without_files(end)
        if exists(end) or self._is_gone(path) or not exists(path):
            return end
        if follow and is_link(path):
            return self.to_write(real(path), keep=keep)
        self._copy(path, end, keep)
        return end

    def _copy(self, path: str, copy: str, keep: bool) -> None:
        result = native.lstat(path)
        mode = stat.S_IMODE(result.st_mode)
        if stat.S_ISDIR(result.st_mode):
            native.mkdir(copy, mode | 0o700)
        elif stat.S_ISLNK(result.st_mode):
            native.symlink(native.readlink(path), copy)
        elif stat.S_ISREG(result.st_mode):
            if not native.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            with native_open(copy, "wb") as target:
                if keep:
                    with native_open(path, "rb") as source:
                        shutil.copyfileobj(source, target, 1 << 20)
            native.chmod(copy, mode)
            native.utime(copy, ns=(result.st_atime_ns, result.st_mtime_ns))

    def copy_tree(self, name: Name) -> str:
        """Copy a whole folder or file, so that it can be moved; return the copy's path."""
        copy = self.to_write(name, follow=False)
        path = self.named(name)
        if os.path.isdir(copy) and not is_link(copy) and not self._is_passed(path):
            for child in self.listed(path):
                self.copy_tree(os.path.join(path, child))
        return copy

    def remove(self, name: Name) -> None:
        """Delete a file or link."""
        path = self.named(name)
        copy = self.to_read(path, follow=False)
        if self._is_passed(path) or self._is_copy(copy):
            native.unlink(copy)
        elif not exists(path) or (os.path.isdir(path) and not is_link(path)):
            number = errno.EISDIR if exists(path) else errno.ENOENT
            raise OSError(number, os.strerror(number), path)
        elif not native.access(os.path.dirname(path), os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        self.forget(path)

    def forget(self, name: Name) -> None:
        """Hide the user's file of this name from now on."""
        path = self.named(name)
        if not self._is_passed(path) and exists(path):
            descriptor = native.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, os.fsencode(path) + b"\0")
            finally:
                os.close(descriptor)

    def listed(self, name: Name) -> list[str]:
        """Return the names in a folder: the user's files and copies, without deleted files."""
        path = self.named(name)
        copy = self._files + path
        if self._is_passed(path) or (not exists(copy) and not self._any_gone()):
            return list(native.listdir(self.to_read(name)))
        names: dict[str, None] = {}
        if exists(copy):
            names.update(dict.fromkeys(native.listdir(copy)))
        if not self._is_gone(path) and exists(path):
            theirs = native.listdir(path)
            names.update((their, None) for their in theirs if not self._is_gone(f"{path}/{their}"))
        if not names and not exists(copy):
            native.listdir(self.to_read(name))  # raises the right error
        return list(names)

    def exists(self, name: Name) -> bool:
        """Return True if a path exists, even as a broken link."""
        return exists(self.to_read(name, follow=False))

    def is_merged(self, name: Name) -> bool:
        """Return True if a folder may have copies in the trial's folder, or deleted entries."""
        path = self.named(name)
        return not self._is_passed(path) and (exists(self._files + path) or self._any_gone())

    def _make_parent(self, path: str) -> None:
        missing = []
        folder = os.path.dirname(path)
        while not exists(self._files + folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for item in reversed(missing):
            with suppress(FileExistsError):
                native.mkdir(self._files + item)

    def _has_parent(self, path: str) -> bool:
        parent = os.path.dirname(path)
        copy = self._files + parent
        if exists(copy):
            return os.path.isdir(copy)
        if self._is_gone(parent) or not os.path.isdir(parent):
            return False
        if not native.access(parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return True

    def _without_files(self, path: str) -> str:
        if path == self._files:
            return "/"
        return path[len(self._files) :] if path.startswith(self._files + "/") else path

    def _is_copy(self, path: str) -> bool:
        return path.startswith(self._files + "/")

    def _is_passed(self, path: str) -> bool:
        if path.startswith("/dev/shm/"):  # may contain files; shared memory needs no Python path
            return False
        return any(path == item or path.startswith(item + "/") for item in self._passes)

    def _any_gone(self) -> bool:
        with suppress(FileNotFoundError):
            size = native.stat(self._journal).st_size
            if size != self._read:
                with native_open(self._journal, "rb") as journal:
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
