"""Packages that only some clusters need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flatout.errors import SubmitError


def require(module: str, extra: str) -> Any:
    """A module of an optional dependency."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise SubmitError(
            f"{module.partition('.')[0]} is not installed here",
            do=f"pip install 'flatout[{extra}]'",
        ) from error
