"""The threads of the OpenMP that torch itself uses, for our kernels."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch


@cache
def parallel() -> int:
    """The address of the GOMP_parallel that torch calls, or 0 where it has another OpenMP.

    As for torch itself, a library that was preloaded comes before the one that torch brings.
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
    """The last two arguments of a kernel: what `parallel` gives, 0 for one thread, and how many."""
    threads = torch.get_num_threads()
    return (parallel() if threads > 1 else 0), threads
