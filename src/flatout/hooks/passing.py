"""Hooks on modules for a few steps, which copies and pickles of the modules do without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PassingHook:
    """Calls a function of ours. A module that is copied or saved meanwhile gets `nothing` instead:
    what the function belongs to can be neither.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function of ours."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _nothing, ()


def nothing(*args: Any, **kwargs: Any) -> None:
    """What a copy calls."""


def _nothing() -> Callable[..., None]:
    return nothing
