"""Padding that a loss counts as a target, although it is trivial to predict."""

from __future__ import annotations

from typing import Any

from flatout.observe.graph_nodes import first_child
from flatout.observe.padding import at_the_end, most_common
from flatout.observe.saved import saved_number

# _LEAST_ROWS: minimum number of rows of targets; _LEAST_PLACES: minimum number of tokens per row;
# _ROWS: maximum number of rows inspected.
_LEAST_ROWS, _LEAST_PLACES, _ROWS = 4, 4, 64
# Smallest share of rows with the same last value before the padding, for that value to be an end
# token.
_ENDED = 0.9


def padding_in(node: Any) -> dict[str, Any] | None:
    """Return the padding among the targets of an nll_loss, and whether an end token precedes it.

    None where the loss ignores the padding, or the targets have no padding.
    """
    labels = node._saved_target
    # An unreduced loss may be multiplied by a mask, and a class may have zero weight.
    if not node._saved_reduction or node._saved_weight is not None or labels.is_floating_point():
        return None
    for rows in _as_rows(node, labels):
        rows = rows[:_ROWS].cpu()
        if rows.shape[0] < _LEAST_ROWS or rows.shape[1] < _LEAST_PLACES:
            continue
        value = int(most_common(rows[:, -1].numpy()))
        padded = at_the_end((rows == value).numpy())
        if padded and value != saved_number(node, "ignore_index"):
            is_ended = _are_ended(rows, value)
            return {"value": value, "padded": padded, "of": rows.numel(), "is_ended": is_ended}
    return None


def _as_rows(node: Any, labels: Any) -> list[Any]:
    if labels.dim() == 3:  # labels of a loss over [samples, classes, positions]
        return [labels[:, 0]] if labels.shape[1] == 1 else []
    child = node
    for _ in range(4):  # a log_softmax and views
        child = first_child(child)
        if child is None:
            return []
        sizes = getattr(child, "_saved_self_sym_sizes", None)
        if sizes is not None and len(sizes) == 3:
            first, second = int(sizes[0]), int(sizes[1])
            if labels.dim() == 1 and first * second == labels.numel():
                rows = labels.view(first, second)
                return [rows, rows.t()]
    return []


def _are_ended(rows: Any, value: int) -> bool:
    counts = (rows != value).flip(1).int().cummax(1).values.sum(1)
    padded = (counts > 0) & (counts < rows.shape[1])
    if not bool(padded.any()):
        return False
    last = rows[padded].gather(1, counts[padded][:, None] - 1)
    return bool((last == last.mode(0).values).float().mean() >= _ENDED)
