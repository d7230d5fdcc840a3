"""Integers that autograd's nodes have saved, with the operator's own sign."""

from __future__ import annotations

from typing import Any


def saved_number(node: Any, name: str) -> int:
    """Return a number that a node has saved. Torch returns it as unsigned: -100 is 2**64 - 100."""
    number = int(getattr(node, f"_saved_{name}"))
    return number - 2**64 if number >= 2**63 else number
