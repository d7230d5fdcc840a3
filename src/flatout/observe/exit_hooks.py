"""Ways to leave a script without coming back: os._exit, and becoming another program."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any


def watch_exits(ends: Callable[[bool], None], becomes: Callable[[str], None]) -> None:
    """Hooks into them, so that what was seen is written first.

    Args:
        ends: is told whether the script ends well, before os._exit.
        becomes: is given the other program's file before an exec; and "" where that has failed.
    """
    exits = os._exit

    @wraps(exits)
    def _exit(status: int) -> None:
        ends(status == 0)
        exits(status)

    os._exit = _exit  # type: ignore[assignment]
    # The others of their kind call one of these two.
    os.execv = _becoming(os.execv, becomes)
    os.execve = _becoming(os.execve, becomes)


def _becoming(original: Any, becomes: Callable[[str], None]) -> Any:
    @wraps(original)
    def become(path: Any, *args: Any) -> None:
        becomes(os.fsdecode(path) if not isinstance(path, int) else f"file {path}")
        try:
            original(path, *args)
        finally:
            becomes("")

    return become
