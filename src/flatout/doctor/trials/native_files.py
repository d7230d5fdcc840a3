"""Python's file functions as they were before redirect.py, and queries that use them."""

from __future__ import annotations

import builtins
import os
import stat
from typing import Any

native_open = builtins.open
native: Any = type("Native", (), {})()
for _name in (
    *("open", "stat", "lstat", "listdir", "scandir", "access", "readlink", "chdir", "getcwd"),
    *("listxattr", "getxattr", "statvfs"),
    *("rename", "replace", "unlink", "rmdir", "mkdir", "link", "symlink"),
    *("truncate", "utime", "chmod", "chown", "setxattr", "removexattr", "mkfifo"),
):
    setattr(native, _name, getattr(os, _name))


def exists(path: str) -> bool:
    """Return True if a path exists, even as a broken link."""
    try:
        native.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def is_link(path: str) -> bool:
    """Return True if a path is a symbolic link."""
    try:
        return stat.S_ISLNK(native.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


def end_of(path: str, follow: bool) -> str:
    """Return the path without links; its last part may stay a link unless `follow`."""
    if follow:
        return real(path)
    folder, name = os.path.split(path)
    return os.path.join(real(folder), name)


def real(path: str) -> str:
    """Return os.path.realpath of a path, computed by the unpatched functions."""
    parts = path.split("/")[1:]
    resolved, followed = "/", 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            resolved = os.path.dirname(resolved)
            continue
        entry = os.path.join(resolved, part)
        if is_link(entry) and followed < 40:
            followed += 1
            target = native.readlink(entry)
            parts[:0] = target.split("/")
            resolved = "/" if target.startswith("/") else resolved
        else:
            resolved = entry
    return resolved
