"""Load the C extensions, and name the one that is missing.

An install without a fitting wheel and without a C compiler has none of them.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from typing import Any

from flatout.errors import FlatoutError

INSTALL = (
    "install a C compiler, then `pip install --force-reinstall --no-deps --no-cache-dir flatout`"
)


class MissingExtension(FlatoutError, ImportError):
    """Raised if a C extension of Flatout is needed that is not built."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Flatout's C extension {name} is not built", do=INSTALL)


class _Missing:
    def __init__(self, name: str) -> None:
        self._flatout_name = name

    def __getattr__(self, attribute: str) -> Any:
        raise MissingExtension(self._flatout_name)


def required(name: str) -> Any:
    """Return the extension, or a stand-in whose first use raises `MissingExtension`."""
    try:
        return import_module(f"flatout.kernels.{name}")
    except ImportError:
        return _Missing(name)


def optional(name: str) -> Any:
    """Return the extension, or warn once in a process and return None.

    For kernels whose work torch or numpy can do, more slowly.
    """
    try:
        return import_module(f"flatout.kernels.{name}")
    except ImportError:
        _warn()
        return None


@cache
def _warn() -> None:
    warnings.warn(
        "Flatout's C extensions are missing, so torch and numpy do the work of some of them, "
        f"with the same results, more slowly. To get them: {INSTALL}.",
        RuntimeWarning,
        stacklevel=2,
    )
