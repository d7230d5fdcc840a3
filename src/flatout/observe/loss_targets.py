"""Target of a loss, from the graph that autograd has made of the loss.

torch's losses save the target. Losses written by hand save tensors that it can be computed from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flatout.observe.graph_nodes import children, first_child, nearest_nodes, node_of

# Maximum number of graph nodes that are searched.
_NODES = 256
_OF_CLASSES = (
    "NllLossBackward0",
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
)
_LOSSES = (*_OF_CLASSES, "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
# Operators on a difference that save it, as in (out - y) ** 2 or (out - y).abs().
_OF_DIFFERENCES = ("PowBackward0", "AbsBackward0", "MulBackward0")
_TAKEN = ("IndexBackward0", "GatherBackward0")
_VIEWS = (
    "AliasBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "TBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
)  # fmt: skip
# Largest distance of a difference of integers from an integer, for rounding.
_WHOLE = 1e-4


class Target(NamedTuple):
    """Target of a loss.

    Attributes:
        values: one target value per sample, exact except for rounding where the value comes from a
            difference.
        are_classes: whether the targets are classes, as in a classification loss.
        output, difference: for a loss written by hand, the output of the model, and the output
            minus the target (the target minus the output where `sign` is -1).
    """

    values: Any
    are_classes: bool
    output: Any = None
    difference: Any = None
    sign: int = 1

    def as_column_of(self, torch: Any, rows: Any) -> Any:
        """Return the values, taken from a column of these rows if it gives equal differences."""
        if self.difference is None or rows.dtype != self.output.dtype:
            return self.values
        count = len(rows)
        apart = self.sign * (self.output[:count, None] - rows)
        same = (apart == self.difference[:count, None]).all(0)
        return rows[:, int(same.to(torch.uint8).argmax())] if bool(same.any()) else self.values


def target_under(torch: Any, root: Any, output: Any) -> Target | None:
    """Return the target of the loss if there is exactly one, else None."""
    found = [
        target
        for node in nearest_nodes(root, _NODES, _has_target)
        if (target := _target_of(torch, node, output)) is not None
    ]
    if len(found) != 1 or found[0].values.requires_grad:
        return None
    return found[0]


def _has_target(node: Any) -> bool:
    name = node.name()
    if name in _OF_DIFFERENCES:
        return _below(node) == "SubBackward0"
    return name in _LOSSES or (name in _TAKEN and _below(node) == "LogSoftmaxBackward0")


def _below(node: Any) -> str:
    child = first_child(node)
    return "" if child is None else str(child.name())


def _target_of(torch: Any, node: Any, output: Any) -> Target | None:
    if not _has_target(node):
        return None
    name = node.name()
    if name in _LOSSES:
        return Target(node._saved_target, name in _OF_CLASSES)
    classes = _taken(torch, node) if name in _TAKEN else None
    if classes is not None:
        return Target(classes, are_classes=True)
    return _of_difference(torch, node, output) if name in _OF_DIFFERENCES else None


def _taken(torch: Any, node: Any) -> Any:
    if node.name() == "GatherBackward0":
        index = node._saved_index
        is_column = index.dim() == 2 and index.shape[1] == 1
        return index[:, 0] if is_column else None
    indices = node._saved_indices
    if len(indices) != 2 or any(item is None or item.dim() != 1 for item in indices):
        return None
    rows, classes = indices
    is_each = len(rows) == len(classes) and not rows.is_floating_point()
    in_order = is_each and bool((rows == torch.arange(len(rows), device=rows.device)).all())
    return classes if in_order else None


def _of_difference(torch: Any, node: Any, output: Any) -> Target | None:
    apart: Any = node._saved_self
    other: Any = getattr(node, "_saved_other", None)
    if output is None or apart is None or apart.numel() != output.numel():
        return None
    if torch.is_tensor(other) and (other.shape != apart.shape or not bool((other == apart).all())):
        return None  # a product that is not a square
    subtraction, given_by = first_child(node), node_of(output)
    left, right = children(subtraction)
    sign = 1 if right is None else -1
    child = left if right is None else right
    if (left is not None and right is not None) or subtraction._saved_alpha != 1:
        return None
    while child is not None and child != given_by and child.name() in _VIEWS:
        child = first_child(child)
    if child is None or child != given_by:
        return None
    given, apart = output.detach().reshape(-1), apart.detach().reshape(-1)
    values = given.double() - sign * apart.double()
    whole = values.round()
    if bool(((values - whole).abs() <= _WHOLE * given.abs().clamp(min=1)).all()):
        values = whole
    return Target(values, are_classes=False, output=given, difference=apart, sign=sign)
