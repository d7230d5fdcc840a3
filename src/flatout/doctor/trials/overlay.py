"""Files that the kernel copies on write: a mount namespace in which all folders are overlays.

A process inside sees the machine's files and all files written inside. The writes are stored in the
scratch folder, invisible to processes outside, whether Python, native code or a subprocess writes.

Every folder that contains no other mount is covered by an overlay. A folder above such mounts stays
read-only itself (`Read-only file system`). Files of other users cannot be changed unless the caller
is root.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from flatout.doctor.trials import namespaces
from flatout.errors import FlatoutError

_libc = ctypes.CDLL(None, use_errno=True)
# Values from <sys/mount.h> and <fcntl.h>.
_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_CWD, _ATTR_READ_ONLY = -100, 1
# Folders that are not covered: no plain files, or used by processes to communicate. /dev/shm is
# mounted anew, so that no shared memory of the trial stays in it.
_AS_THEY_ARE = ("/proc", "/sys", "/dev")
_SHARED_MEMORY = "/dev/shm"
_MOST = 400


def enter(
    upper: Path,
    passes: Sequence[Path] = (),
    *,
    as_user: bool | None = None,
    writes: Sequence[str] = (),
) -> None:
    """Move this process and its future children into a mount namespace with overlays.

    The process must have one thread only. Its current folder stays the same.
    """
    here = os.getcwd()
    ways = [] if os.geteuid() == 0 and not as_user else _foreign_folders([here, *writes])
    namespaces.leave(namespaces.MOUNTS, as_user=as_user)
    # System V shared memory and POSIX queues end with this namespace. A few kernels lack this kind
    # of namespace.
    with suppress(OSError):
        namespaces.unshare(namespaces.MESSAGES)
    real = [(path, os.open(path, os.O_PATH)) for path in passes]
    mounted = _mounted()
    # The overlay over the stored writes comes last, since they then have no path any more.
    wanted = sorted(_to_cover(mounted), key=lambda value: _holds(value, os.path.realpath(upper)))
    covered = [folder for folder in wanted if _cover(folder, upper, ways)]
    if not any(_holds(folder, os.path.realpath(here)) for folder in covered):
        raise FlatoutError(f"{here} cannot be overlaid")
    for path, descriptor in real:
        bound = namespaces.BIND | namespaces.RECURSIVE
        namespaces.mount(f"/proc/self/fd/{descriptor}", str(path), "", bound)
        os.close(descriptor)
    for mount in mounted:
        if mount not in covered:
            _make_read_only(mount)
    if os.path.isdir(_SHARED_MEMORY):
        size = os.statvfs(_SHARED_MEMORY)
        room = f"size={size.f_blocks * size.f_frsize}"
        namespaces.mount("tmpfs", _SHARED_MEMORY, "tmpfs", 0, room)
    os.chdir(here)


def _to_cover(mounted: Sequence[str]) -> list[str]:
    result = [folder for mount in mounted for folder in _without_mounts(mount, set(mounted))]
    if len(result) > _MOST:
        raise FlatoutError(f"{len(result)} folders would have to be covered")
    return result


def _without_mounts(folder: str, mounted: set[str]) -> Iterator[str]:
    if not os.path.isdir(folder):
        return
    if not any(_holds(folder, mount) for mount in mounted if mount != folder):
        yield folder
        return
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            is_special = entry.path in _AS_THEY_ARE or entry.path in mounted
            if not is_special and entry.is_dir(follow_symlinks=False):
                yield from _without_mounts(entry.path, mounted)


def _foreign_folders(paths: Sequence[str]) -> list[tuple[str, int]]:
    """Return the folders of other users above some paths, with this user's rights in each."""
    found: dict[str, int] = {}
    for path in paths:
        above = [str(item) for item in Path(os.path.realpath(path)).parents][::-1][1:]
        owned = [os.path.isdir(item) and os.stat(item).st_uid == os.geteuid() for item in above]
        last = max((n for n, own in enumerate(owned) if not own), default=-1)
        for item in above[: last + 1]:
            if os.path.isdir(item):
                rights = (os.R_OK, 4), (os.W_OK, 2), (os.X_OK, 1)
                found[item] = 0o700 & sum(bit for ask, bit in rights if os.access(item, ask)) << 6
    return sorted(found.items())


def _cover(folder: str, upper: Path, ways: Sequence[tuple[str, int]]) -> bool:
    number = len(list(upper.iterdir())) // 2
    layer, work = upper / f"{number}", upper / f"{number}.work"
    layer.mkdir()
    work.mkdir()
    layers = {"lowerdir": folder, "upperdir": str(layer), "workdir": str(work)}
    options = ",".join(f"{key}={_escaped(value)}" for key, value in layers.items())
    try:
        os.chmod(layer, os.stat(folder).st_mode & 0o7777)
        made = [(layer / os.path.relpath(path, folder), mode) for path, mode in ways
                if path != folder and _holds(folder, path)]  # fmt: skip
        for path, _ in made:
            path.mkdir()
        for path, mode in reversed(made):
            path.chmod(mode)
        namespaces.mount("overlay", folder, "overlay", 0, f"{options},userxattr")
    except OSError:
        return False
    return True


def _make_read_only(mount: str) -> None:
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    result = _libc.syscall(
        _MOUNT_SETATTR, _AT_CWD, os.fsencode(mount), 0, attributes, ctypes.c_size_t(size)
    )
    namespaces.checked(result, f"making {mount} read-only")


def _mounted() -> list[str]:
    return [
        name
        for name in namespaces.mounted()
        if not any(_holds(kept, name) for kept in _AS_THEY_ARE) and os.path.exists(name)
    ]


def _holds(folder: str, path: str | Path) -> bool:
    return f"{path}/".startswith(folder.rstrip("/") + "/")


def _escaped(path: str) -> str:
    for special in ("\\", ",", ":"):
        path = path.replace(special, f"\\{special}")
    return path
