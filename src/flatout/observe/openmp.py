"""Which OpenMP library a process has, and what was asked of one."""

from __future__ import annotations

import os
import re
from pathlib import Path

OPENMP = ("KMP_", "GOMP_", "OMP_")
"""How the names of the variables begin that OpenMP libraries read."""

_LIBRARY = re.compile(r"/(lib(?:gomp|iomp5|omp)\b[^/\n]*)$", re.MULTILINE)


def libraries(maps: Path = Path("/proc/self/maps")) -> list[str] | None:
    """Returns the file names of those that are loaded; None where that cannot be seen."""
    try:
        return sorted(set(_LIBRARY.findall(maps.read_text(errors="replace"))))
    except OSError:
        return None


def settings() -> dict[str, str]:
    """Returns the variables that are meant for one."""
    return {name: value for name, value in os.environ.items() if name.startswith(OPENMP)}
