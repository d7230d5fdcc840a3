"""The threads of torch's own OpenMP library, for Flatout's kernels."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def parallel() -> int:
    """Return the address of the GOMP_parallel that torch calls, or 0 if it has another OpenMP.

    As for torch itself, a preloaded library precedes the one that torch brings.
    """
    libraries: list[str | None] = [None, *map(str, Path(torch.__path__[0], "lib").glob("*_cpu.so"))]
    for library in libraries:
        try:
            function = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def team() -> tuple[int, int]:
    """Return a kernel's last two arguments: the address of `parallel` and the number of threads.

    The address is 0 for one thread.
    """
    threads = torch.get_num_threads()
    return (parallel() if threads > 1 else 0), threads
