"""A number for each id of a field: its count, or its row of a table."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flatout.kernels import missing_extension
from flatout.kernels.checks import Numbers

_c = missing_extension.required("_ids")


# Fields are numbered from 0 to FIELDS - 1, and numbers are below 2**48.
FIELDS = 2**15
_BITS = np.uint64(48)
_LARGEST = 2**48 - 1
_FEWEST = 1024
_BYTES = 16  # bytes of a slot


class Items(NamedTuple):
    """The content of an `IdNumbers` by field and id, rising; each int64 of shape (ids,)."""

    fields: Numbers
    ids: Numbers
    numbers: Numbers


class IdNumbers:
    """A number from 1 on for each id of a field.

    Args:
        room: expected number of ids; it grows if there are more.

    Attributes:
        count: number of ids that it holds.
    """

    def __init__(self, room: int = 0) -> None:
        self.count = 0
        self._slots = _slots(slots_for(room))

    def bytes_to_add(self, ids: int) -> int:
        """Return the additional bytes for adding this number of ids, all of which may be new."""
        slots = slots_for(self.count + ids)
        return 0 if slots <= len(self._slots) else _BYTES * (slots + self.count)

    def add(self, ids: Numbers, fields: Numbers, numbers: Numbers | None = None) -> None:
        """Add to the numbers of ids; a new id begins at 0.

        Args:
            ids: C-contiguous int64 of shape (rows, width) or (rows,), any values.
            fields: the field of each id of a row, int64 of shape (width,), each in 0..FIELDS-1.
            numbers: of the shape of `ids`, such that sums stay between 1 and 2**48-1; None for 1.
        """
        done = 0
        while True:
            done, self.count = _c.add(self._slots, ids, fields, numbers, done, self.count)
            if done == ids.size:
                return
            self._grow()

    def rows(
        self, ids: Numbers, fields: Numbers, firsts: Numbers, buckets: Numbers, out: Numbers
    ) -> int:
        """Write the row of each id: its number less 1.

        An unknown id has the row `firsts + hash % buckets` of its field.

        Args:
            ids: as for `add`.
            fields: as for `add`.
            firsts: int64 of the shape of `fields`.
            buckets: int64 of the shape of `fields`; 0 for no buckets.
            out: gets the rows, int64 of the shape of `ids`.

        Returns:
            the index, in the flat ids, of the first unknown id without a bucket, or -1. The row of
            such an id is 0.
        """
        return int(_c.rows(self._slots, ids, fields, firsts, buckets, out))

    def items(self) -> Items:
        """Return all ids and numbers."""
        slots = self._slots[self._slots[:, 1] != 0]
        packed = slots[:, 1].view(np.uint64)
        fields = (packed >> _BITS).astype(np.int64)
        numbers = (packed & np.uint64(_LARGEST)).astype(np.int64)
        order = np.lexsort((slots[:, 0], fields))
        return Items(fields[order], slots[order, 0], numbers[order])

    def _grow(self) -> None:
        slots = self._slots[self._slots[:, 1] != 0]
        self._slots, self.count = _slots(2 * len(self._slots)), 0
        packed = slots[:, 1].view(np.uint64)
        fields = (packed >> _BITS).astype(np.int64)
        numbers = (packed & np.uint64(_LARGEST)).astype(np.int64)
        for field in np.unique(fields):
            own = fields == field
            ids = np.ascontiguousarray(slots[own, 0])
            key = np.array([field])
            _, self.count = _c.add(self._slots, ids, key, numbers[own], 0, self.count)


def hash_ids(ids: Numbers, field: int) -> Any:
    """Return the hash of a field's ids as uint64: splitmix64's finalizer (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        h = ids.astype(np.uint64) + np.uint64((int(field) + 1) * 0x9E3779B97F4A7C15 % 2**64)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return h ^ (h >> np.uint64(31))


def slots_for(ids: int) -> int:
    """Return the number of slots for these ids: a power of two, at most half of it used."""
    return max(_FEWEST, 1 << (2 * ids - 1).bit_length() if ids else 0)


def _slots(count: int) -> Numbers:
    # numpy asks for huge pages for this array, but not for zeros
    slots = np.empty((count, 2), np.int64)
    slots.fill(0)
    return slots
