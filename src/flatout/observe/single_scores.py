"""Softmax of a single score in a loss, which is 1 whatever the score is."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

_SOFTMAX = {"SoftmaxBackward0": "softmax", "LogSoftmaxBackward0": "log_softmax"}
# Before these lies what is inside a model, such as attention to a single token.
_LAYERS = (
    "AddmmBackward0", "MmBackward0", "BmmBackward0", "LinearBackward0", "ConvolutionBackward0",
)  # fmt: skip
_NODES = 200


def single_scores(root: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Nodes behind the last layer that take softmax over a dimension of 1, with what it is.

    Args:
        root: the node that gave a loss.

    Raises:
        RuntimeError: the graph's numbers are freed.
    """
    known, todo = {root}, [root]
    while todo and len(known) < _NODES:
        node = todo.pop()
        name = node.name()
        if name in _SOFTMAX:
            shape = [int(size) for size in node._saved_result.shape]
            if prod(shape) > 1 and shape[_signed(node._saved_dim)] == 1:
                yield node, {"outer": _SOFTMAX[name], "shape": shape}
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        # Weights that are learned, too, are no probabilities of classes.
        if name in _LAYERS or (name == "MulBackward0" and len(children) > 1):
            continue
        todo += [child for child in children if child not in known]
        known.update(children)


def _signed(number: int) -> int:
    """As torch has it: it tells dimensions from the end as unsigned numbers."""
    return number - 2**64 if number >= 2**63 else number
