"""Into how many micro-batches stages split a batch, and which other numbers may be faster."""

from __future__ import annotations

from collections.abc import Sequence

# If no one says: the ranks then idle a fifth of the time at most.
_FOR_EACH_STAGE = 4


def micro_batches(asked: int, stages: int, rows: int, least: int = 1) -> int:
    """Into how many a copy's rows of a batch are split."""
    return max(1, min(asked or _FOR_EACH_STAGE * stages, rows // least))


def others_to_try(stages: int, rows: int) -> tuple[Sequence[int], Sequence[int]]:
    """Numbers beside the usual one: larger ones, and smaller ones, the nearest first.

    Micro-batches become so large at most that no stage keeps the activations of more than half a
    batch (with 1F1B).
    """
    usual = micro_batches(0, stages, rows)
    larger = [n for n in (2 * usual, 4 * usual) if n <= rows]
    smaller = [usual // 2] if usual // 2 >= 2 * stages else []
    return larger, smaller
