"""Counts of the ids in training data, by which a map of ids then grows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flatout.data.execution.samples import Costs, Samples
from flatout.data.ids.id_map import FieldPlaces, places_of, width_of
from flatout.data.reading.block import Numbers, Ragged
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Column
from flatout.data.reading.threads import Pool
from flatout.errors import DataError
from flatout.kernels import IdNumbers, Items
from flatout.measure import available_bytes, usable_cpus
from flatout.words import size_words

# Rows that one thread decodes at a time.
_ROWS = 8192


class IdCounts:
    def __init__(self, column: Column) -> None:
        self.column = column
        self.places: FieldPlaces = places_of(column.ids, width_of(column))
        self.numbers = IdNumbers()

    def add(self, values: Any) -> None:
        ids = np.ascontiguousarray(values.values if isinstance(values, Ragged) else values)
        if len(self.places.fields) == 1:
            ids = ids.reshape(-1)
        self._check_memory(ids.size)
        self.numbers.add(ids, self.places.fields)

    def _check_memory(self, more: int) -> None:
        wanted = self.numbers.bytes_to_add(more)
        if wanted and wanted > (free := available_bytes()):
            raise DataError(
                f"column {self.column.name!r}: {self.numbers.count:,} different ids so far, and to "
                f"count more of them takes {size_words(wanted)}; {size_words(free)} are free",
                do='hash them: vocabulary = "none" and buckets in the ids of this column',
            )

    def merge(self, items: Items) -> None:
        for number in np.unique(items.fields):
            own = items.fields == number
            ids = np.ascontiguousarray(items.ids[own])
            self._check_memory(len(ids))
            self.numbers.add(ids, np.array([number]), items.numbers[own])

    def items(self) -> Items:
        """Return fields, ids and counts, in ascending order of field, then id."""
        return self.numbers.items()


def count_ids(samples: Samples, numbers: Numbers, counts: Mapping[str, IdCounts]) -> None:
    numbers = np.sort(numbers)
    parts = [numbers[at : at + _ROWS] for at in range(0, len(numbers), _ROWS)]
    threads, buffers, costs = usable_cpus(), Buffers(), Costs()
    with Pool(threads) as pool:
        # the blocks of all rows may need too much memory at once
        for at in range(0, len(parts), threads):
            some = parts[at : at + threads]
            for block in pool.map(lambda part: samples.make(part, buffers, 0, costs), some):
                for name, value in counts.items():
                    value.add(block.columns[name])
