"""Classes as their authors wrote them, while they are sent to another process.

Whoever hooks into classes of the user's says here how the hooks are taken off and put back. A class
that a notebook or a script defines is sent with all that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

_takers: list[Callable[[], AbstractContextManager[None]]] = []


def register(without: Callable[[], AbstractContextManager[None]]) -> None:
    """Add a function that gives a block within which some hooks are off."""
    if without not in _takers:
        _takers.append(without)


@contextmanager
def unhooked() -> Iterator[None]:
    """Within, no class has a hook of Flatout's."""
    with ExitStack() as stack:
        for without in _takers:
            stack.enter_context(without())
        yield
