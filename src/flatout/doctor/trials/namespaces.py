"""Namespaces of the kernel, and mounts in them (https://man7.org/linux/man-pages/man7/namespaces.7.html)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Values from <sched.h> and <sys/mount.h>.
MOUNTS, PROCESSES, NETWORK = 0x00020000, 0x20000000, 0x40000000
MESSAGES = 0x08000000  # CLONE_NEWIPC
_USER = 0x10000000
BIND, RECURSIVE = 4096, 16384
_PRIVATE = 1 << 18
# Mount point that systemd mounts on access, on machines without containers.
_MOUNTED_WHEN_OPENED = "/proc/sys/fs/binfmt_misc"
_libc = ctypes.CDLL(None, use_errno=True)


def leave(kinds: int, *, as_user: bool | None = None) -> None:
    """Move this process into new namespaces: MOUNTS, and all further `kinds`.

    The process must have one thread only. Its next child enters the new namespace of PROCESSES.
    """
    if as_user is not None:
        _leave(kinds, as_user)
        return
    try:
        _leave(kinds, False)
    except PermissionError:
        _leave(kinds, True)


def unshare(kinds: int) -> None:
    """Move this process into new namespaces of these kinds, if the process has the privilege."""
    checked(_libc.unshare(kinds), "unshare")


def _leave(kinds: int, as_user: bool) -> None:
    user, group = os.geteuid(), os.getegid()
    checked(_libc.unshare(kinds | (_USER if as_user else 0)), "unshare")
    if as_user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    # Without this, mounts of this process would appear outside too.
    mount("", "/", "", RECURSIVE | _PRIVATE)


def mount_own_proc() -> None:
    """Mount the /proc of this process' own PROCESSES, in its own MOUNTS.

    Mounts below the previous /proc stay: parts that a container hides or replaces.
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
    """Return all mount points in order, each once."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    names = [line.split(" ")[4].encode().decode("unicode_escape") for line in lines]
    return list(dict.fromkeys(names))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    result = _libc.mount(
        os.fsencode(source or "none"),
        os.fsencode(target),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        os.fsencode(options) or None,
    )
    checked(result, f"mounting at {target}")


def checked(result: int, what: str) -> None:
    """Raise the OSError of a libc call that did not return 0."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
