"""Exits from a script without a return: os._exit, and replacement by another program."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flatout.hooks import wrap


def watch_exits(ends: Callable[[bool], None], becomes: Callable[[str], None]) -> None:
    """Hook into these functions, so that the observation is written first."""
    wrap(os, "_exit", "observe", _ending, ends)
    # All other functions of the exec family call execv or execve.
    wrap(os, "execv", "observe", _becoming, becomes)
    wrap(os, "execve", "observe", _becoming, becomes)


def _ending(original: Any, ends: Callable[[bool], None]) -> Any:
    def _exit(status: int) -> None:
        ends(status == 0)
        original(status)

    return _exit


def _becoming(original: Any, becomes: Callable[[str], None]) -> Any:
    def become(path: Any, *args: Any) -> None:
        becomes(os.fsdecode(path) if not isinstance(path, int) else f"file {path}")
        try:
            original(path, *args)
        finally:
            becomes("")

    return become
