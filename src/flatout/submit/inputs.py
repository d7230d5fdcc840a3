"""The inputs of a script, and whether the nodes of a cluster see them.

The file system of a path decides: nodes see a network's file system, and no disk of this machine.
The user can add paths that nodes see by `--shared PATH`.
"""

from __future__ import annotations

import ast
import glob
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import SubmitError
from flatout.submit.code import CodeArchive

# More links make a batch script that no person reads.
_MOST_LINKS = 200

# The kinds of file systems in /proc/self/mountinfo, without the "fuse." of FUSE.
_NETWORK = frozenset(
    (
        "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "cifs", "smb3", "smbfs",
        "afs", "orangefs", "pvfs2", "panfs", "wekafs", "ocfs2", "gfs2", "9p", "virtiofs", "sshfs",
        "mfs", "moosefs", "lizardfs", "s3fs", "gcsfuse", "juicefs", "cvmfs2", "blobfuse",
        "blobfuse2", "goofys", "mount-s3", "mountpoint-s3", "quobyte", "bee", "pvfs", "dfuse",
        "daos",
    )
)  # fmt: skip
# The longest text in code that may name a file, and the most files that are listed.
_LONGEST_NAME, _MOST_NAMED = 200, 20


@dataclass(frozen=True)
class Input:
    """A file, folder, pattern or URL that a script reads.

    Attributes:
        given: the text of the user or of the script's arguments.
        path: the absolute path, or the unchanged URL.
        lies_on: the mount point and the file system, such as "/home (ext4)"; "" for a URL.
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
        """True if the input is a URL such as s3://bucket/day."""
        return "://" in self.path

    def links(self, root: Path) -> list[tuple[str, str]]:
        """Return paths to link into a copy of the code, each with its name there."""
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
        return not (self.is_url or self.is_seen or self.travels)

    @property
    def words(self) -> str:
        if self.is_url:
            return f"{self.given}: each node reads it itself"
        if self.travels:
            return f"{self.given}: travels with the code"
        who = "all nodes see it" if self.is_seen else "no node sees it"
        return f"{self.given}: lies on {self.lies_on}, {who}"


@dataclass(frozen=True)
class Mount:
    """The mount point of a file system, and its kind."""

    point: str
    kind: str

    def __str__(self) -> str:
        return f"{self.point} ({self.kind})"

    @property
    def is_network(self) -> bool:
        return self.kind.removeprefix("fuse.") in _NETWORK


def mount_of(path: str | os.PathLike[str], table: str | None = None) -> Mount:
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
    """Return whether nodes see a path, by its file system or the user's `--shared`."""
    real = os.path.realpath(path)
    is_shared = any(_is_within(real, os.path.realpath(item)) for item in shared)
    return is_shared or mount_of(real).is_network


def input_of(
    given: str, root: Path, code: CodeArchive | None = None, shared: Sequence[str] = ()
) -> Input:
    if "://" in given:
        return Input(given, given)
    path = os.path.normpath(root / given)
    files = set() if code is None else set(code.files)
    travels = code is not None and all(
        _is_among(path, root, files) for path in glob.glob(path) or [path]
    )
    return Input(given, path, str(mount_of(path)), is_seen(path, shared), travels)


def only_whole(code: CodeArchive, inputs: Sequence[Input], root: Path) -> CodeArchive:
    """Return the code without files in folders of data, which are linked as a whole."""
    folders = [
        f"{os.path.relpath(item.path, root)}/"
        for item in inputs
        if not (item.is_url or item.travels) and os.path.isdir(item.path)
    ]
    kept = [file for file in code.files if not any(file.startswith(folder) for folder in folders)]
    total = sum((root / item).stat().st_size for item in kept)
    return CodeArchive(tuple(kept), total, code.left_out)


def named_in_code(root: Path, code: CodeArchive, inputs: Sequence[Input]) -> list[tuple[str, str]]:
    """Return files below `root` that a text in the code names, and that are not sent.

    Each comes with the code file that names it.
    """
    known = [Path(os.path.realpath(item.path)) for item in inputs if not item.is_url]
    found: dict[str, str] = {}
    for name in (file for file in code.files if file.endswith(".py")):
        with suppress(OSError, ValueError, SyntaxError, RecursionError):
            for node in ast.walk(ast.parse((root / name).read_bytes())):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and _stays_here(text, root, code, known):
                    found.setdefault(text, name)
    return list(found.items())[:_MOST_NAMED]


def _stays_here(text: str, root: Path, code: CodeArchive, known: list[Path]) -> bool:
    if not 0 < len(text) <= _LONGEST_NAME or "\0" in text or "\n" in text:
        return False
    path = root / text
    if not os.path.isfile(path):
        return False
    inside = os.path.relpath(path, root)
    is_input = any(Path(os.path.realpath(path)).is_relative_to(item) for item in known)
    return not (inside.startswith("..") or inside in code.files or is_input)


def in_arguments(arguments: Sequence[str], root: Path) -> list[str]:
    """Return the arguments of a script, or their parts after `=`, that name files or URLs."""
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
