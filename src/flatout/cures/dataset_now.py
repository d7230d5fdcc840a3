"""Which dataset the script's latest batch is from."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from flatout.hooks import wrap


class Dataset(NamedTuple):
    """Samples that a DataLoader makes batches of.

    Attributes:
        identity: tells it from others.
        name: of its class.
        samples: how many it has.
        passes: over it that have begun.
    """

    identity: int
    name: str
    samples: int
    passes: int


class DatasetNow:
    """Sees whose batches the DataLoaders give.

    Attributes:
        dataset: of the latest batch; None where there was none, or its length is not known.
    """

    def __init__(self) -> None:
        self.dataset: Dataset | None = None
        self._passes: Counter[int] = Counter()

    def watch(self) -> None:
        """Hooks into the iterators of DataLoaders."""
        owner = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        wrap(owner, "__next__", "cures", self._around)

    def _around(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            begins = not getattr(iterator, "_num_yielded", 1)
            batch = original(iterator)
            dataset = iterator._dataset
            self._passes[id(dataset)] += begins
            self.dataset = _of(dataset, self._passes[id(dataset)])
            return batch

        return __next__


def _of(dataset: Any, passes: int) -> Dataset | None:
    try:
        return Dataset(id(dataset), type(dataset).__name__, len(dataset), passes)
    except (TypeError, NotImplementedError):  # a stream
        return None
