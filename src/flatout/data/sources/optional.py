"""Packages that only some sources need."""

from __future__ import annotations

from importlib import import_module

from flatout.errors import DataError


def require(package: str, extra: str, kind: str) -> None:
    """Import a package, or raise an error that states how to install it."""
    try:
        import_module(package)
    except ImportError as error:
        raise DataError(
            f"{kind} is read by {package}, which cannot be imported: {error}",
            do=f"pip install 'flatout[{extra}]'",
        ) from error
