"""Softmax of a single score in a loss, which is 1 whatever the score is."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from flatout.observe.graph_nodes import nearest_nodes
from flatout.observe.saved import saved_number

_SOFTMAX = {"SoftmaxBackward0": "softmax", "LogSoftmaxBackward0": "log_softmax"}
# Nodes of layers: below them lies the inside of a model, such as attention to a single token.
_LAYERS = (
    "AddmmBackward0", "MmBackward0", "BmmBackward0", "LinearBackward0", "ConvolutionBackward0",
)  # fmt: skip
# Maximum number of graph nodes that are searched.
_NODES = 200


def single_scores(root: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield nodes after the last layer that take softmax over a dimension of 1, with details."""
    for node in nearest_nodes(root, _NODES, _is_inside):
        softmax = _SOFTMAX.get(node.name())
        if softmax is None:
            continue
        shape = [int(size) for size in node._saved_result.shape]
        if prod(shape) > 1 and shape[saved_number(node, "dim")] == 1:
            yield node, {"outer": softmax, "shape": shape}


def _is_inside(node: Any) -> bool:
    name = node.name()
    if name == "MulBackward0":  # multiplied by a tensor with gradient: no class probabilities
        return sum(child is not None for child, _ in node.next_functions) > 1
    return name in _SOFTMAX or name in _LAYERS
