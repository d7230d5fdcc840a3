"""Which file a command line runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flatout.doctor.torchrun import under_torchrun


def script_file(what: Sequence[str]) -> Path | None:
    """The Python file that is run, where it lies in the user's own folders; else None.

    Args:
        what: a script and its arguments; a module after "-m"; or torchrun's command line.

    Raises:
        FlatoutError: torchrun's command line cannot be read.
    """
    mark = "-c"  # stands where the script's own part begins
    ranks = under_torchrun(what, [mark])
    own = ranks[ranks.index(mark) + 1 :] if ranks else list(what)
    if own[0] != "-m":
        path = Path(own[0])
        return path / "__main__.py" if path.is_dir() else path
    module = Path(*own[1].split("."))
    for path in (module.with_suffix(".py"), module / "__main__.py", module / "__init__.py"):
        if path.is_file():
            return Path(os.path.relpath(path))
    return None
