"""The CPU time and memory that control groups (cgroups, version 1 or 2) leave to this process.

A container's limit may be set on any group from the process's own up to the mount, so every level
is read and the smallest limit counts. The files and their meaning: the Linux kernel's
admin-guide/cgroup-v2 and admin-guide/cgroup-v1/memory, and scheduler/sched-bwc.

`root` is the folder that holds `proc` and `sys`; only tests use another one than "/".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Version 1 writes "no limit" as the largest number of pages that fits in 63 bits.
_UNLIMITED = 1 << 60


class _Group(NamedTuple):
    folder: Path
    version: int


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPUs' worth of time that the cgroups allow, or None if they set no quota."""
    quotas = [quota for group in _groups("cpu", root) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the cgroups' memory limit in bytes, or None if they set none.

    Version 2's `memory.high` counts as a limit: beyond it the kernel slows the process down.
    """
    limits = [limit for group in _groups("memory", root) if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def cgroup_memory_available(root: Path = Path("/")) -> int | None:
    """Return the bytes that the cgroups still allow, or None if they set no limit.

    At each level that is the limit less the used bytes. File pages, which the kernel frees under
    pressure, do not count as used; /proc/meminfo's MemAvailable counts the same way.
    """
    left = [
        max(0, limit - max(0, _used(group) - _reclaimable(group)))
        for group in _groups("memory", root)
        if (limit := _limit(group)) is not None
    ]
    return min(left, default=None)


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of CPUs that this process may keep busy, by its affinity and cgroup quota.

    A quota of 2.5 CPUs counts as 2: a third thread would be throttled at every barrier.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = cgroup_cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    result = _own_path(controller, root)
    if result is None:
        return
    version, path = result
    mount = _mount(controller, version, path, root)
    if mount is None:
        return
    mount_root, top = mount
    own = top / path.removeprefix(mount_root).lstrip("/")
    # From another cgroup namespace the path does not exist below the mount. The mount then is the
    # container's own group.
    if ".." in own.parts or not own.is_dir():
        own = top
    yield _Group(own, version)
    while own != top:
        own = own.parent
        yield _Group(own, version)


def _own_path(controller: str, root: Path) -> tuple[int, str] | None:
    unified = None
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return 1, path
        if not controllers:
            unified = (2, path)
    return unified


def _mount(controller: str, version: int, path: str, root: Path) -> tuple[str, Path] | None:
    mounts = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if version == 2 and kind != "cgroup2":
            continue
        if version == 1 and not (kind == "cgroup" and controller in options.split(",")):
            continue
        mount_root, point = left.split(" ")[3:5]
        mounts.append((mount_root.rstrip("/"), root / point.lstrip("/")))
    holding = [mount for mount in mounts if f"{path}/".startswith(f"{mount[0]}/")]
    return next(iter(holding or mounts), None)


def _quota(group: _Group) -> float | None:
    if group.version == 2:
        quota, _, period = (_read(group.folder / "cpu.max") or "max").partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    allowed = _number(group.folder / "cpu.cfs_quota_us")
    period_us = _number(group.folder / "cpu.cfs_period_us")
    if allowed is None or period_us is None or allowed <= 0:
        return None
    return allowed / period_us


def _limit(group: _Group) -> int | None:
    names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
    limits = [limit for name in names if (limit := _number(group.folder / name)) is not None]
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def _used(group: _Group) -> int:
    name = "memory.current" if group.version == 2 else "memory.usage_in_bytes"
    return _number(group.folder / name) or 0


def _reclaimable(group: _Group) -> int:
    prefix = "" if group.version == 2 else "total_"
    names = (f"{prefix}inactive_file", f"{prefix}active_file")
    lines = (_read(group.folder / "memory.stat") or "").splitlines()
    return sum(int(value) for name, value in map(str.split, lines) if name in names)


def _number(path: Path) -> int | None:
    text = _read(path)
    return None if text is None or text == "max" else int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
