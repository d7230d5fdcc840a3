"""A map-style torch Dataset as a source of samples, to which stages can be applied."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch.utils.data import IterableDataset

from flatout.data.execution.samples import Fetched
from flatout.data.pipeline import Pipeline
from flatout.data.planner import FirstSamples
from flatout.data.sources.datasets.iterable import name_digest
from flatout.data.stages import Options
from flatout.errors import DataError


class DatasetRows:
    """Samples of a Dataset by index. Their structure is known once a sample was made."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.rows = len(dataset)

    @cached_property
    def digest(self) -> str:
        return name_digest(self.dataset, self.rows)

    def begin(self, options: Options, say: Callable[[str], None]) -> FirstSamples:
        return FirstSamples(Fetched(self.dataset, self.digest))

    def describe(self) -> str:
        return f"{self.rows:,} samples of {type(self.dataset).__name__}"


def torch_dataset(dataset: Any) -> Pipeline:
    """Return samples of a Dataset: x, (x, y) or (x, y, weight), as tensors, arrays or numbers.

    `Trainer.fit` and `as_source` also take a map-style Dataset directly; use this to apply stages.
    A Dataset that draws from the global generators, as augmentations do, runs in the thread that
    iterates.

    Raises:
        DataError: the Dataset has no samples, or no length.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"expected a Dataset with __getitem__, found {type(dataset).__name__}",
            do="pass an IterableDataset to fit as it is, or in a DataLoader",
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty: expected at least 1 sample, found 0")
    return Pipeline(DatasetRows(dataset))
