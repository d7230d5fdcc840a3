"""Terms of a loss that give no parameter a gradient: new tensors with requires_grad.

An example is `torch.tensor([...], requires_grad=True)` of numbers that were read with `.item()`.
Such a tensor takes part in a loss without an error, but the graph ends at the tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from flatout.observe.graph_nodes import children, nearest_nodes
from flatout.observe.observation import Site
from flatout.observe.origins import function_at, parsed

# _NODES: maximum number of graph nodes that are searched; _TERMS: maximum number of terms of a
# loss.
_NODES, _TERMS = 2000, 16
_LEAF = "torch::autograd::AccumulateGrad"
_MAKES = ("tensor", "Tensor", "FloatTensor", "Variable", "as_tensor", "zeros", "ones", "full")


def cut_terms(torch: Any, root: Any, trained: set[int]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the terms of a sum that end in tensors which are no parameters, with these tensors."""
    terms = list(_terms(root))
    made = [_made_of(torch, term, trained) for term, _ in terms]
    if any(tensors is None for tensors in made):  # otherwise the whole loss lacks parameters
        for (term, parent), tensors in zip(terms, made, strict=True):
            if tensors:
                yield (parent if term.name() == _LEAF else term), tensors


def _terms(root: Any) -> Iterator[tuple[Any, Any]]:
    todo, count = [(root, root)], 0
    while todo and count < _TERMS:
        node, parent = todo.pop()
        count += 1
        inner = [child for child in children(node) if child is not None]
        if len(inner) == 2 and node.name() in ("AddBackward0", "SubBackward0") and _is_one(node):
            todo += [(child, node) for child in inner]
        else:
            yield node, parent


def _is_one(node: Any) -> bool:
    return all(int(size) == 1 for size in node._input_metadata[0].shape)


def _made_of(torch: Any, term: Any, trained: set[int]) -> list[Any] | None:
    tensors = []
    nodes = list(nearest_nodes(term, _NODES))
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return None  # a custom autograd.Function, which may use further tensors
        if node.name() == _LEAF:
            tensor = node.variable
            if type(tensor) is not torch.Tensor or id(tensor) in trained:
                return None
            tensors.append(tensor)
    return tensors if len(nodes) < _NODES and tensors else None


def line_that_makes(site: Site) -> Site:
    """Return the only line of the function that makes a tensor with requires_grad, else `site`."""
    function = function_at(site.file, site.line) if parsed(site.file) is not None else None
    lines = {
        node.lineno
        for node in (ast.walk(function) if function is not None else ())
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in _MAKES
        and any(
            item.arg == "requires_grad" and getattr(item.value, "value", None) is True
            for item in node.keywords
        )
    }
    return Site(site.file, lines.pop()) if len(lines) == 1 else site
