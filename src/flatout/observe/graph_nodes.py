"""Traversal of the graph that autograd has made of a loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

# DistributedDataParallel adds this node after its outputs if it finds unused parameters.
_SINK = "_DDPSinkBackward"


def node_of(tensor: Any) -> Any:
    """Return the node that computed a tensor, or None if the tensor needs no gradient."""
    return _behind_sinks((tensor.grad_fn, tensor.output_nr))


def children(node: Any) -> list[Any]:
    """Return the nodes that computed the inputs of a node; an input without gradient gives None."""
    return [_behind_sinks(edge) for edge in node.next_functions]


def first_child(node: Any) -> Any:
    """Return the node that computed the first input of a node, None without gradient."""
    return next(iter(children(node)), None)


def _behind_sinks(edge: tuple[Any, int]) -> Any:
    node, number = edge
    while node is not None and node.name() == _SINK:
        inner = node.next_functions  # one edge for each tensor
        node, number = inner[min(number, len(inner) - 1)]
    return node


def nearest_nodes(
    root: Any, most: int, ends: Callable[[Any], bool] = lambda node: False
) -> Iterator[Any]:
    """Yield each node once, nodes nearest to the root first; `ends` stops the search below a node.

    About `most` nodes are visited at most.
    """
    todo, known = deque([root]), {root}
    while todo and len(known) < most:
        node = todo.popleft()
        yield node
        if ends(node):
            continue
        for child in children(node):
            if child is not None and child not in known:
                known.add(child)
                todo.append(child)
