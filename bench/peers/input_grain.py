"""Grain in one process, which was faster than several for data in memory.

samples   it shuffles row numbers and puts them in batches; a gather for each batch
batches   of a source whose elements are batches, shuffled and gathered by numpy
"""

from __future__ import annotations

from collections.abc import Iterator

import grain
import input_job
import numpy as np


class Batches:
    """A random-access source of the batches of an epoch."""

    def __init__(self, epoch: int, size: int, *columns: np.ndarray) -> None:
        self.size, self.columns = size, columns
        self.order = np.random.default_rng(epoch).permutation(len(columns[0]))

    def __len__(self) -> int:
        return -(-len(self.order) // self.size)

    def __getitem__(self, batch: int) -> input_job.Batch:
        rows = self.order[batch * self.size : (batch + 1) * self.size]
        return tuple(column.take(rows, axis=0) for column in self.columns)


def main() -> None:
    arguments = input_job.start()
    images, labels = input_job.memory(arguments)
    size = input_job.BATCH[arguments.kind]

    def batch(rows: list[int]) -> input_job.Batch:
        return labels.take(rows), images.take(rows, axis=0)

    def samples(epoch: int) -> Iterator[input_job.Batch]:
        numbers = grain.MapDataset.range(len(labels)).shuffle(seed=epoch)
        return iter(numbers.batch(size, batch_fn=batch))

    def batches(epoch: int) -> Iterator[input_job.Batch]:
        return iter(grain.MapDataset.source(Batches(epoch, size, labels, images)))

    one_pass = {"samples": samples, "batches": batches}[arguments.form]
    input_job.measure(arguments, lambda: one_pass)


if __name__ == "__main__":
    main()
