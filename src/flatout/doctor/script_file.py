"""The Python file that a command line runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.doctor.torchrun import under_torchrun
from flatout.script_source import file_of


def script_file(what: Sequence[str]) -> Path | None:
    """Return the Python file that is run, if it lies in the user's own folders; else None."""
    mark = "-c"  # marks where the script's own part of the command begins
    ranks = under_torchrun(what, [mark])
    own = ranks[ranks.index(mark) + 1 :] if ranks else list(what)
    is_module = own[0] == "-m"
    return file_of(own[1] if is_module else own[0], is_module=is_module)
