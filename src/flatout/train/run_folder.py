"""The run folder that `flatout run --checkpoints FOLDER` gives to a fit that names none."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

from flatout.console import say_once

_FITS = count(1)


def run_of_command(run: str | Path | None, resume: bool | str) -> dict[str, Any]:
    """The arguments `run` and `resume` of a fit's Loop.

    The first fit of a process that names no folder gets the command's, the second FOLDER-2, and so
    on. It goes on from its newest checkpoint: the command may be one that has started before.
    """
    given = os.environ.get("FLATOUT_CHECKPOINTS")
    if given is None:
        return {"run": run, "resume": resume}
    if run is not None:
        say_once(f"--checkpoints {given} is not used: the script says run={str(run)!r}")
        return {"run": run, "resume": resume}
    number = next(_FITS)
    return {"run": given if number == 1 else f"{given}-{number}", "resume": resume or True}
