"""OpenMP libraries of a process, and the settings for these libraries."""

from __future__ import annotations

import os
import re
from pathlib import Path

OPENMP = ("KMP_", "GOMP_", "OMP_")
"""Prefixes of the environment variables that OpenMP libraries read."""

_LIBRARY = re.compile(r"/(lib(?:gomp|iomp5|omp)\b[^/\n]*)$", re.MULTILINE)


def libraries(maps: Path = Path("/proc/self/maps")) -> list[str] | None:
    """Return the file names of the loaded libraries; None if the memory maps are unreadable."""
    try:
        return sorted(set(_LIBRARY.findall(maps.read_text(errors="replace"))))
    except OSError:
        return None


def settings() -> dict[str, str]:
    """Return the environment variables for OpenMP libraries."""
    return {name: value for name, value in os.environ.items() if name.startswith(OPENMP)}
