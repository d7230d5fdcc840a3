"""Namespaces of the kernel, and what is mounted in them (https://man7.org/linux/man-pages/man7/namespaces.7.html)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# From <sched.h> and <sys/mount.h>.
MOUNTS, PROCESSES, NETWORK = 0x00020000, 0x20000000, 0x40000000
MESSAGES = 0x08000000  # CLONE_NEWIPC
_USER = 0x10000000
BIND, RECURSIVE = 4096, 16384
_PRIVATE = 1 << 18
# Of systemd, on machines without containers.
_MOUNTED_WHEN_OPENED = "/proc/sys/fs/binfmt_misc"
_libc = ctypes.CDLL(None, use_errno=True)


def leave(kinds: int, *, as_user: bool | None = None) -> None:
    """Puts this process into new namespaces: MOUNTS, and what else is asked for.

    It must have one thread only. A namespace of PROCESSES is entered by what it forks next.
    """
    if as_user is not None:
        _leave(kinds, as_user)
        return
    try:
        _leave(kinds, False)
    except PermissionError:
        _leave(kinds, True)


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of some kinds, if it has the right to."""
    checked(_libc.unshare(kinds), "unshare")


def _leave(kinds: int, as_user: bool) -> None:
    user, group = os.geteuid(), os.getegid()
    checked(_libc.unshare(kinds | (_USER if as_user else 0)), "unshare")
    if as_user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    # Or what is mounted here would be mounted outside too.
    mount("", "/", "", RECURSIVE | _PRIVATE)


def mount_own_proc() -> None:
    """The /proc of this process' own PROCESSES, in MOUNTS of its own.

    What is mounted below the one of before stays: parts that a container hides or replaces.
    """
    below = [
        item for item in mounted() if item.startswith("/proc/") and item != _MOUNTED_WHEN_OPENED
    ]
    kept = [(name, os.open(name, os.O_PATH)) for name in below if os.path.exists(name)]
    mount("proc", "/proc", "proc", 0)
    for name, descriptor in kept:
        mount(f"/proc/self/fd/{descriptor}", name, "", BIND)
        os.close(descriptor)


def mounted() -> list[str]:
    """Where something is mounted, in order, each once."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    names = [line.split(" ")[4].encode().decode("unicode_escape") for line in lines]
    return list(dict.fromkeys(names))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        os.fsencode(source or "none"),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        os.fsencode(options) or None,
    )
    checked(result, f"mounting at {target}")


def checked(result: int, what: str) -> None:
    """Raises the OSError of a call of libc's that returned not 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
