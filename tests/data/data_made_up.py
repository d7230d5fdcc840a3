"""A source of made-up rows for tests of what stands behind sources."""

from __future__ import annotations

import numpy as np

from flatout.data.reading.block import Block, Ragged, offsets_of
from flatout.data.reading.schema import Column, Schema

COLUMNS = (
    Column(name="x", dtype="float32", shape=(3,)),
    Column(name="ids", dtype="int64", ragged=True),
    Column(name="y", dtype="int64", role="target"),
)


class MadeUp:
    """Row n holds n, as a vector, as n % 4 ids, and n % classes as the target."""

    def __init__(self, rows=100, classes=5, columns=COLUMNS, random=True, name="made up"):
        self.schema = Schema(format="made_up", columns=columns)
        self.rows = rows
        self.classes = classes
        self.random = random
        self.digest = f"{name} {rows}"
        self.taken = []
        self.left_out = ()

    def take(self, numbers, buffers):
        self.taken.extend(numbers.tolist())
        numbers = numbers[~np.isin(numbers, self.left_out)]
        x = buffers.empty((len(numbers), 3), np.float32)
        x[:] = numbers[:, None] + np.arange(3) / 4
        lengths = numbers % 4
        ids = Ragged(np.repeat(numbers, lengths), offsets_of(lengths))
        columns = {"x": x, "ids": ids, "y": numbers % self.classes}
        return Block({column.name: columns[column.name] for column in self.schema.columns}, numbers)

    def targets(self):
        return None

    def lengths(self):
        return np.arange(self.rows) % 4

    def where(self, number):
        return f"made up:{number}"

    def describe(self):
        return f"{self.rows} made-up rows"

    def notes(self):
        return []


def same(a, b):
    """Whether two batches hold the same, in all that they hold."""
    from flatout.data.batches.batch import named_tensors

    ours, theirs = ([*named_tensors("", tuple(batch[:4]))] for batch in (a, b))
    return len(ours) == len(theirs) and all(
        x[0] == y[0] and x[1].dtype == y[1].dtype and x[1].tolist() == y[1].tolist()
        for x, y in zip(ours, theirs, strict=True)
    )
