"""Whether tables on a device are stepped by Triton kernels (table_rows_triton.py).

Without Triton, and behind a kernel that could not be compiled or started, torch's operators do it.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from typing import Any

import torch

_failed = False


def kernels_for(device: torch.device) -> Any:
    """The module of the kernels; None where torch's operators are to be used."""
    return _module() if device.type == "cuda" and not _failed else None


def give_up(error: Exception) -> None:
    """Use torch's operators from now on, and say so.

    Raises:
        Exception: the error, where it is one that torch's operators would have too.
    """
    global _failed
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _failed = True
    lines = str(error).strip().splitlines() or [""]
    warnings.warn(
        f"embedding tables are stepped by torch's operators, more slowly: a Triton kernel failed "
        f"({type(error).__name__}: {lines[0][:200]})",
        RuntimeWarning,
        stacklevel=3,
    )


@cache
def _module() -> Any:
    try:
        import triton
    except ImportError:
        return None
    # Some systems have a package of this name that is none.
    return import_module("flatout.kernels.table_rows_triton") if hasattr(triton, "jit") else None
