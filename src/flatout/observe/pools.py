"""Activations before max-pooling that could run after it."""

from __future__ import annotations

from typing import Any

from flatout.observe.model_facts import unwrapped
from flatout.observe.observation import Model, Site


def look_at_pools(module: Any, facts: Model) -> None:
    """Fill in the pairs that could be swapped, their modules, and the line of the first pair."""
    root = unwrapped(module)[-1]
    if facts.is_compiled or not any(_may_pool(inner) for inner in root.modules()):
        return
    from flatout.models import find_pairs

    pairs = find_pairs(root)
    facts.pool_after = [(pair.activation, pair.pooling) for pair in pairs]
    prefix = next((name for name, inner in module.named_modules() if inner is root), "")
    parts = {part for pair in pairs for part in pair.modules}
    facts.pool_parts = sorted(f"{prefix}.{part}".strip(".") for part in parts)
    sites = [Site(pair.file, pair.line) for pair in pairs if pair.file]
    facts.pool_site = sites[0] if sites else None


def _may_pool(module: Any) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    if code is not None and any("max_pool" in name for name in code.co_names):
        return True
    return type(module).__name__.startswith("MaxPool")
