"""The kernel refuses this process, and all that it starts, to write outside some folders, or to
signal others.

Landlock (https://docs.kernel.org/userspace-api/landlock.html) needs no rights, and cannot be taken
off again. Where files are not overlaid it holds what Python's functions cannot see: native code and
subprocesses. They get `Permission denied`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# System calls: the same numbers on every architecture.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
# All rights that change files: write, remove, make of each kind; since version 2 move elsewhere,
# since 3 truncate.
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
# Since version 6: the bits of `scoped`.
_SIGNALS = 1 << 1
# Of these a single file can be given; the others are of folders.
_OF_FILES = _WRITE_FILE | _TRUNCATE


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Of the kernel's Landlock; 0 without."""
    return max(int(_libc.syscall(_CREATE, None, 0, _ASK_VERSION)), 0)


def restrict_writes(folders: Sequence[Path]) -> bool:
    """Allow changes in some folders and files only, from now on."""
    result = version()
    if not result:
        return False
    handled = _CHANGES | (_REFER if result >= 2 else 0) | (_TRUNCATE if result >= 3 else 0)
    return _restrict([handled], folders)


def restrict_signals() -> bool:
    """Let signals reach this process and what it starts only, from now on."""
    return version() >= 6 and _restrict([0, 0, _SIGNALS])


def _restrict(asked: Sequence[int], folders: Sequence[Path] = ()) -> bool:
    # Handled rights of files and of the network, then scopes; as many as this kernel may know.
    attributes = (ctypes.c_uint64 * len(asked))(*asked)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    rules = int(_libc.syscall(_CREATE, attributes, size, 0))
    if rules < 0:
        return False
    try:
        for folder in folders:
            _allow(rules, folder, asked[0])
        return bool(
            _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
            and _libc.syscall(_RESTRICT, rules, 0) == 0
        )
    finally:
        os.close(rules)


def _allow(rules: int, folder: Path, handled: int) -> None:
    descriptor = os.open(folder, os.O_PATH)
    try:
        rights = handled if folder.is_dir() else handled & _OF_FILES
        rule = _Beneath(rights, descriptor)
        if _libc.syscall(_ADD, rules, _BENEATH, ctypes.byref(rule), 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
