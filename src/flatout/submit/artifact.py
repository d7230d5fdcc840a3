"""A file that a person can read, change and keep, written before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.atomic_file import atomic_write
from flatout.errors import SubmitError


@dataclass(frozen=True)
class Artifact:
    """One file of a job's folder.

    Args:
        name: of the file, without a folder.
        text: what it holds. Odd bytes of paths and arguments are surrogates, as in `os.fsdecode`.
        mode: its rights.
    """

    name: str
    text: str
    mode: int = 0o600

    @property
    def lines(self) -> int:
        """How many lines it has."""
        return len(self.text.splitlines())

    def write(self, folder: Path) -> Path:
        """Write it into a folder, whole or not at all; where it lies then."""
        path = folder / self.name
        with atomic_write(path, "wb") as file:
            os.fchmod(file.fileno(), self.mode)
            file.write(os.fsencode(self.text))
        return path


def refuse(problems: Sequence[str], where: str, do: str | None = None) -> None:
    """Tell all that is wrong at once, if anything is.

    Raises:
        SubmitError: something is wrong.
    """
    if problems:
        raise SubmitError("\n  ".join(problems), where=where, do=do)
