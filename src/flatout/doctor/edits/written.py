"""Writes edits into the user's files, all or none, together with a patch that undoes them."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flatout.cache_folder import kind_folder
from flatout.doctor.edits.patch import folder_of, of_files
from flatout.doctor.edits.source import Source, by_file
from flatout.doctor.finding import Edit
from flatout.errors import FlatoutError


@dataclass(frozen=True)
class Fixed:
    """The files that were written.

    Attributes:
        files: files that have changed.
        undo: patch in the cache folder that undoes the changes.
        command: shell command that applies `undo`.
    """

    files: tuple[str, ...]
    undo: Path
    command: str


def fix(edits: Iterable[Edit]) -> Fixed:
    """Make edits in the user's files. Each file is replaced atomically and keeps its mode.

    Raises:
        FlatoutError: a file has changed or cannot be written, or two edits change the same words.
            Then no file has changed.
    """
    every = list(edits)
    changed: dict[str, tuple[bytes, bytes]] = {}
    for file, some in by_file(every).items():
        source = Source.read(file)
        changed[os.path.realpath(file)] = source.encode(), source.with_edits(some).encode()
        _must_be_writable(file)
    root = folder_of(every)
    undo = _keep(of_files({file: (b, a) for file, (a, b) in changed.items()}, root))
    try:
        _replace(changed)
    except BaseException:
        undo.unlink()
        raise
    return Fixed(tuple(changed), undo, _command(undo, root))


def _must_be_writable(file: str) -> None:
    real = os.path.realpath(file)
    for path in (real, os.path.dirname(real)):
        if not os.access(path, os.W_OK):
            raise FlatoutError(
                "the file cannot be written, so none was changed",
                where=file,
                do="see its permissions, or apply the diff yourself: flatout doctor --diff",
            )


def _keep(patch: str) -> Path:
    folder = kind_folder("edits")
    started = time.strftime("undo-%Y%m%d-%H%M%S-")
    descriptor, name = tempfile.mkstemp(".patch", started, folder)
    with open(descriptor, "wb") as file:
        file.write(patch.encode("utf-8", "surrogateescape"))
    return Path(name)


def _command(undo: Path, root: Path) -> str:
    has_patch = shutil.which("patch") or not shutil.which("git")
    start = (
        ["patch", "-d", str(root), "-p1", "-i"] if has_patch else ["git", "-C", str(root), "apply"]
    )
    return shlex.join([*start, str(undo)])


def _replace(changed: Mapping[str, tuple[bytes, bytes]]) -> None:
    ready: dict[str, str] = {}
    done: list[str] = []
    try:
        for file, (_, after) in changed.items():
            ready[file] = _beside(file, after)
        for file, (before, _) in changed.items():
            if Path(file).read_bytes() != before:
                raise FlatoutError("the file is being changed, so none was", where=file)
        for file, new in ready.items():
            os.replace(new, file)
            done.append(file)
    except BaseException as error:
        for file in done:
            os.replace(_beside(file, changed[file][0]), file)
        if isinstance(error, OSError):
            raise FlatoutError(
                f"a file cannot be written ({error.strerror}), so none was changed",
                where=error.filename,
            ) from error
        raise
    finally:
        for new in ready.values():
            with suppress(FileNotFoundError):
                os.unlink(new)


def _beside(file: str, data: bytes) -> str:
    descriptor, new = tempfile.mkstemp(
        ".part", f".{os.path.basename(file)}-", os.path.dirname(file)
    )
    with open(descriptor, "wb") as written:
        written.write(data)
        written.flush()
        os.fsync(descriptor)
    shutil.copymode(file, new)
    status = os.stat(file)
    with suppress(PermissionError):
        os.chown(new, status.st_uid, status.st_gid)
    return new
