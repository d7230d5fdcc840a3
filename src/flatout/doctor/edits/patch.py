"""Edits as a unified diff for `patch -p1` and `git apply`."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from flatout.doctor.edits.source import Source, by_file
from flatout.doctor.finding import Edit
from flatout.errors import FlatoutError

_NO_END = "\\ No newline at end of file\n"


def diff(edits: Iterable[Edit], root: Path) -> str:
    """Return the edits as a unified diff.

    Bytes that are not UTF-8 become surrogates: write the diff with errors="surrogateescape".

    Args:
        edits: edits of files below `root`.
        root: the folder in which the diff will be applied.

    Raises:
        FlatoutError: a file has changed or lies outside `root`, or two edits change the same words.
    """
    result = {}
    for file, some in by_file(edits).items():
        source = Source.read(file)
        result[file] = source.encode(), source.with_edits(some).encode()
    return of_files(result, root)


def of_files(files: Mapping[str, tuple[bytes, bytes]], root: Path) -> str:
    """Return the diff of files that are each given before and after the change."""
    parts: list[str] = []
    for file in sorted(files):
        name = _below(file, root)
        before, after = (_lines(data) for data in files[file])
        end = "\t" if " " in name else ""  # without the tab, patch ends the name at its first space
        for line in difflib.unified_diff(before, after, f"a/{name}{end}", f"b/{name}{end}"):
            parts.append(line if line.endswith("\n") else f"{line}\n{_NO_END}")
    return "".join(parts)


def folder_of(edits: Iterable[Edit]) -> Path:
    """Return the folder for a diff.

    It is the current folder if all files lie below it, otherwise their common folder.
    """
    files = [os.path.realpath(edit.file) for edit in edits]
    here = os.path.realpath(os.getcwd())
    common = os.path.commonpath([os.path.dirname(file) for file in files] or [here])
    return Path(here if os.path.commonpath([common, here]) == here else common)


def _below(file: str, root: Path) -> str:
    path = os.path.relpath(os.path.realpath(file), os.path.realpath(root))
    if path.startswith(os.pardir + os.sep):
        raise FlatoutError(f"the file does not lie below {root}", where=file)
    return path.replace(os.sep, "/")


def _lines(data: bytes) -> list[str]:
    return list(io.StringIO(data.decode("utf-8", "surrogateescape"), newline="\n"))
