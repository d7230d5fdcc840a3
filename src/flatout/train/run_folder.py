"""The run folder that `flatout run --checkpoints FOLDER` sets for a fit without a run folder."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

from flatout.console import say_once

_FITS = count(1)


def run_of_command(run: str | Path | None, resume: bool | str) -> dict[str, Any]:
    """Return the arguments `run` and `resume` of a fit's Loop.

    In a process, the first fit without a folder uses the command's FOLDER, the second FOLDER-2, and
    so on. Such a fit resumes from its newest checkpoint, since the command may have run before.
    """
    given = os.environ.get("FLATOUT_CHECKPOINTS")
    if given is None:
        return {"run": run, "resume": resume}
    if run is not None:
        say_once(f"--checkpoints {given} is not used: the script says run={str(run)!r}")
        return {"run": run, "resume": resume}
    number = next(_FITS)
    return {"run": given if number == 1 else f"{given}-{number}", "resume": resume or True}
