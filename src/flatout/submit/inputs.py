"""What a script reads, and whether the nodes of a cluster see it.

The file system under a path decides: what is mounted from a network is seen wherever it is mounted,
what lies on a disk of this machine is not. Only the user knows more, and says it: `--shared PATH`.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import SubmitError
from flatout.submit.code import CodeArchive

# A batch script with more links than that is not read by anyone.
_MOST_LINKS = 200

# Of /proc/self/mountinfo; those of FUSE stand behind "fuse.".
_NETWORK = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "glusterfs",
        "cifs",
        "smb3",
        "smbfs",
        "afs",
        "orangefs",
        "pvfs2",
        "panfs",
        "wekafs",
        "ocfs2",
        "gfs2",
        "9p",
        "virtiofs",
        "sshfs",
        "mfs",
        "moosefs",
        "lizardfs",
        "s3fs",
        "gcsfuse",
        "juicefs",
        "cvmfs2",
        "blobfuse",
        "blobfuse2",
        "goofys",
        "mount-s3",
        "mountpoint-s3",
        "quobyte",
        "bee",
        "pvfs",
        "dfuse",
        "daos",
    ]
)


@dataclass(frozen=True)
class Input:
    """Something that a script reads.

    Attributes:
        given: as the user, or the script's arguments, named it.
        path: absolute; a URL as it was given.
        lies_on: the file system and where it is mounted, such as "/home (ext4)"; "" for a URL.
        is_seen: whether the nodes see it at this path.
        travels: whether it is among the code.
    """

    given: str
    path: str
    lies_on: str = ""
    is_seen: bool = False
    travels: bool = False

    @property
    def is_url(self) -> bool:
        """Whether it is reached over a network by its own name, such as s3://bucket/day."""
        return "://" in self.path

    def links(self, root: Path) -> list[tuple[str, str]]:
        """What must be linked into a copy of the code, and by which name within it.

        Raises:
            SubmitError: it is a pattern of very many files.
        """
        inside = os.path.relpath(self.path, root) if not self.is_url else ".."
        is_outside = os.path.isabs(self.given) or inside.startswith("..")
        if self.travels or is_outside:
            return []
        paths = glob.glob(self.path) or [self.path]
        if len(paths) > _MOST_LINKS:
            raise SubmitError(
                f"{self.given} stands for {len(paths):,} files outside of the code",
                do=f"pass them by an absolute path: {self.path}",
            )
        return [(path, os.path.relpath(path, root)) for path in sorted(paths)]

    @property
    def is_missing(self) -> bool:
        """Whether no node would find it."""
        return not (self.is_url or self.is_seen or self.travels)

    @property
    def words(self) -> str:
        """For people: what it is, and who sees it."""
        if self.is_url:
            return f"{self.given}: each node reads it itself"
        if self.travels:
            return f"{self.given}: travels with the code"
        who = "all nodes see it" if self.is_seen else "no node sees it"
        return f"{self.given}: lies on {self.lies_on}, {who}"


@dataclass(frozen=True)
class Mount:
    """Where a file system is mounted, and its kind."""

    point: str
    kind: str

    def __str__(self) -> str:
        return f"{self.point} ({self.kind})"

    @property
    def is_network(self) -> bool:
        """Whether other machines can have it mounted as well."""
        return self.kind.removeprefix("fuse.") in _NETWORK


def mount_of(path: str | os.PathLike[str], table: str | None = None) -> Mount:
    """The file system that a path lies on, or would lie on where it is not there yet."""
    if table is None:
        table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    real = os.path.realpath(path)
    best = Mount("/", "unknown")
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split(" ")[4])
        # The later of two at one point hides the earlier.
        if _is_within(real, point) and len(point) >= len(best.point):
            best = Mount(point, after.split(" ")[0])
    return best


def is_seen(path: str | os.PathLike[str], shared: Iterable[str] = ()) -> bool:
    """Whether nodes see a path: it lies on a network file system, or the user says so."""
    real = os.path.realpath(path)
    is_shared = any(_is_within(real, os.path.realpath(item)) for item in shared)
    return is_shared or mount_of(real).is_network


def look_at(
    given: str, root: Path, code: CodeArchive | None = None, shared: Sequence[str] = ()
) -> Input:
    """What is known of one thing that a script reads."""
    if "://" in given:
        return Input(given, given)
    path = os.path.normpath(root / given)
    files = set() if code is None else set(code.files)
    travels = code is not None and all(
        _is_among(path, root, files) for path in glob.glob(path) or [path]
    )
    return Input(given, path, str(mount_of(path)), is_seen(path, shared), travels)


def only_whole(code: CodeArchive, inputs: Sequence[Input], root: Path) -> CodeArchive:
    """The code without what lies in folders of data, which are linked as a whole."""
    folders = [
        f"{os.path.relpath(item.path, root)}/"
        for item in inputs
        if not (item.is_url or item.travels) and os.path.isdir(item.path)
    ]
    kept = [file for file in code.files if not any(file.startswith(folder) for folder in folders)]
    total = sum((root / item).stat().st_size for item in kept)
    return CodeArchive(tuple(kept), total, code.left_out)


def in_arguments(arguments: Sequence[str], root: Path) -> list[str]:
    """Those of a script's arguments, or what stands behind their `=`, that name files or URLs."""
    result: dict[str, None] = {}
    for argument in arguments:
        for part in dict.fromkeys((argument, argument.partition("=")[2])):
            if part and "\0" not in part and _names_something(part, root):
                result[part] = None
    return list(result)


def _names_something(part: str, root: Path) -> bool:
    if "://" in part:
        return not part.startswith("-") and " " not in part and "=" not in part.split("://")[0]
    if part.startswith("-") or part in (".", ".."):
        return False
    try:
        return os.path.lexists(root / part) or (
            glob.has_magic(part) and any(glob.iglob(str(root / part)))
        )
    except OSError:  # too long for a name
        return False


def _is_among(path: str, root: Path, files: set[str]) -> bool:
    if not os.path.isdir(path):
        return os.path.relpath(path, root) in files
    below = (os.path.join(at, name) for at, _, names in os.walk(path) for name in names)
    inside = [os.path.relpath(item, root) in files for item in below]
    return bool(inside) and all(inside)


def _is_within(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _unescaped(point: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, letter)
    return point
