"""Input: whatever a user hands over becomes batches in an order that is a function.

Names load lazily, because torch is not needed before the first of them is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.data.batch import Batch
    from flatout.data.source import Source, as_source
    from flatout.data.sources.arrays import Arrays, arrays
    from flatout.data.sources.dataset import dataset
    from flatout.data.sources.digits import digits
    from flatout.data.sources.fetch import fetch
    from flatout.data.sources.idx import idx, idx_split
    from flatout.data.sources.iterable import iterable

_HOMES = {
    "Arrays": "flatout.data.sources.arrays",
    "Batch": "flatout.data.batch",
    "Source": "flatout.data.source",
    "arrays": "flatout.data.sources.arrays",
    "as_source": "flatout.data.source",
    "dataset": "flatout.data.sources.dataset",
    "digits": "flatout.data.sources.digits",
    "fetch": "flatout.data.sources.fetch",
    "idx": "flatout.data.sources.idx",
    "idx_split": "flatout.data.sources.idx",
    "iterable": "flatout.data.sources.iterable",
}

__all__ = [
    "Arrays",
    "Batch",
    "Source",
    "arrays",
    "as_source",
    "dataset",
    "digits",
    "fetch",
    "idx",
    "idx_split",
    "iterable",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'flatout.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
