"""Walks the graph that autograd has made of a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any


def nearest_nodes(
    root: Any, most: int, ends: Callable[[Any], bool] = lambda node: False
) -> Iterator[Any]:
    """Each node once, those nearest to the loss first.

    Args:
        root: the loss' own.
        most: where so many are known, it ends.
        ends: whether what is below a node is left out.
    """
    todo, known = deque([root]), {root}
    while todo and len(known) < most:
        node = todo.popleft()
        yield node
        if ends(node):
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in known:
                known.add(child)
                todo.append(child)
