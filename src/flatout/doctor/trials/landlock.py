"""Lets the kernel refuse writes outside some folders and signals to other processes, by Landlock.

Landlock (https://docs.kernel.org/userspace-api/landlock.html) needs no privileges, and applies for
good to this process and its children. Without overlays it refuses writes that Python's functions
cannot redirect: writes of native code and subprocesses, which get `Permission denied`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# Numbers of system calls, the same on every architecture.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
# Rights that change files: write, remove and make each kind of file. Version 2 adds moving to
# another folder, version 3 truncating.
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
# The bit for signals in the field `scoped`, from version 6 on.
_SIGNALS = 1 << 1
# Rights that apply to a single file; all other rights apply to folders.
_OF_FILES = _WRITE_FILE | _TRUNCATE


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Return the version of the kernel's Landlock; 0 if there is none."""
    return max(int(_libc.syscall(_CREATE, None, 0, _ASK_VERSION)), 0)


def restrict_writes(folders: Sequence[Path]) -> bool:
    """Allow changes in these folders and files only, from now on; return True if that worked."""
    result = version()
    if not result:
        return False
    handled = _CHANGES | (_REFER if result >= 2 else 0) | (_TRUNCATE if result >= 3 else 0)
    return _restrict([handled], folders)


def restrict_signals() -> bool:
    """Let signals reach this process and its children only, from now on."""
    return version() >= 6 and _restrict([0, 0, _SIGNALS])


def _restrict(asked: Sequence[int], folders: Sequence[Path] = ()) -> bool:
    # Handled rights of files, then of the network, then scopes; only as many fields as `asked` has.
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
