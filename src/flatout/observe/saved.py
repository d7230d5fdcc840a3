"""Whole numbers that autograd's nodes have saved, as the operator was given them."""

from __future__ import annotations

from typing import Any


def saved_number(node: Any, name: str) -> int:
    """A number that a node has saved. Torch gives it as an unsigned one: -100 is 2**64 - 100.

    Args:
        node: of autograd's graph.
        name: of the number, such as `dim` or `ignore_index`.
    """
    number = int(getattr(node, f"_saved_{name}"))
    return number - 2**64 if number >= 2**63 else number
