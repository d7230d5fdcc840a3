"""Classes without Flatout's hooks, while the classes are sent to another process.

A class that a notebook or a script defines is pickled with all its attributes, hooks included. So
each module that hooks into classes registers a context manager that removes its hooks for a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

_takers: list[Callable[[], AbstractContextManager[None]]] = []


def register(without: Callable[[], AbstractContextManager[None]]) -> None:
    """Register a function that returns a context manager, within which some hooks are removed."""
    if without not in _takers:
        _takers.append(without)


@contextmanager
def unhooked() -> Iterator[None]:
    """Remove Flatout's hooks from all classes in the block."""
    with ExitStack() as stack:
        for without in _takers:
            stack.enter_context(without())
        yield
