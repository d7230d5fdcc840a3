"""A number for each id of a field: how often it was seen, or its row of a table.

The C extension and its numpy fallback give the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flatout.kernels import absent
from flatout.kernels.checks import Numbers, check_array

try:
    from flatout.kernels import _ids as _c
except ImportError:
    _c = None  # type: ignore[assignment]

_use_c = _c is not None and absent.WANTED

# Fields are numbered from 0 to one less, and numbers are below 2**48.
FIELDS = 2**15
_BITS = np.uint64(48)
_LARGEST = 2**48 - 1
_FEWEST = 1024
_BYTES = 16  # of a slot


class Items(NamedTuple):
    """What an `IdNumbers` holds, by field and id, rising; int64 of shape (ids,) each."""

    fields: Numbers
    ids: Numbers
    numbers: Numbers


class IdNumbers:
    """A number from 1 on for each id of a field.

    Args:
        room: ids that it is made for; it grows where there are more.

    Attributes:
        count: ids that it holds.
    """

    def __init__(self, room: int = 0) -> None:
        absent.warn_without(_c)
        self.count = 0
        self._uses_c = _use_c
        self._items = Items(*(np.empty(0, np.int64) for _ in range(3)))
        self._slots = _slots(slots_for(room)) if _use_c else np.empty((0, 2), np.int64)

    def bytes_to_add(self, ids: int) -> int:
        """What it takes in memory, beside what it has, to add so many that may all be new."""
        slots = slots_for(self.count + ids)
        return 0 if slots <= len(self._slots) else _BYTES * (slots + self.count)

    def add(self, ids: Numbers, fields: Numbers, numbers: Numbers | None = None) -> None:
        """Add to the numbers of ids; one that is not there begins at 0.

        Args:
            ids: C-contiguous int64 of shape (rows, width) or (rows,), any values.
            fields: of the ids of a row, int64 of shape (width,), each in 0..FIELDS-1.
            numbers: of the shape of `ids`, such that sums stay between 1 and 2**48-1; None for 1.
        """
        _check(ids, fields)
        if numbers is not None:
            check_array("numbers", numbers, ["int64"], ids.shape, is_written=False)
        if not self._uses_c:
            self._add_sorted(ids, fields, numbers)
            return
        done = 0
        while True:
            done, self.count = _c.add(self._slots, ids, fields, numbers, done, self.count)
            if done == ids.size:
                return
            self._grow()

    def rows(
        self, ids: Numbers, fields: Numbers, firsts: Numbers, buckets: Numbers, out: Numbers
    ) -> int:
        """The row of each id: its number less 1.

        An id that is not there has the row `firsts + hash % buckets` of its field.

        Args:
            ids: as `add` takes them.
            fields: as `add` takes them.
            firsts: int64 of the shape of `fields`.
            buckets: likewise; 0 for none.
            out: gets the rows, int64 of the shape of `ids`.

        Returns:
            the place, in the flat ids, of the first that is not there and has no bucket, or -1.
            The row of such an id is 0.
        """
        _check(ids, fields)
        check_array("firsts", firsts, ["int64"], fields.shape, is_written=False)
        check_array("buckets", buckets, ["int64"], fields.shape, is_written=False)
        check_array("out", out, ["int64"], ids.shape)
        if self._uses_c:
            return int(_c.rows(self._slots, ids, fields, firsts, buckets, out))
        return self._rows_sorted(ids, fields, firsts, buckets, out)

    def items(self) -> Items:
        """All that it holds."""
        if not self._uses_c:
            return self._items
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

    def _add_sorted(self, ids: Numbers, fields: Numbers, numbers: Numbers | None) -> None:
        added = np.ones(ids.size, np.int64) if numbers is None else numbers.reshape(-1)
        of = np.broadcast_to(fields, (ids.size // max(1, len(fields)), len(fields))).reshape(-1)
        all_fields = np.concatenate([self._items.fields, of])
        all_ids = np.concatenate([self._items.ids, ids.reshape(-1)])
        all_numbers = np.concatenate([self._items.numbers, added])
        order = np.lexsort((all_ids, all_fields))
        all_fields, all_ids = all_fields[order], all_ids[order]
        is_first = np.ones(len(order), bool)
        is_first[1:] = (np.diff(all_fields) != 0) | (np.diff(all_ids) != 0)
        starts = np.flatnonzero(is_first)
        sums = np.add.reduceat(all_numbers[order], starts) if len(starts) else all_numbers
        self._items = Items(all_fields[starts], all_ids[starts], sums)
        self.count = len(starts)

    def _rows_sorted(
        self, ids: Numbers, fields: Numbers, firsts: Numbers, buckets: Numbers, out: Numbers
    ) -> int:
        width = len(fields)
        flat, rows = ids.reshape(-1, width), out.reshape(-1, width)
        bad = np.zeros(flat.shape, bool)
        for column in range(width):
            own = self._items.fields == fields[column]
            known, numbers = self._items.ids[own], self._items.numbers[own]
            mine = flat[:, column]
            at = np.minimum(np.searchsorted(known, mine), max(0, len(known) - 1))
            is_known = known[at] == mine if len(known) else np.zeros(len(mine), bool)
            room = int(buckets[column])
            other = np.zeros(len(mine), np.int64)
            if room:
                hashed = hash_ids(mine, fields[column]) % np.uint64(room)
                other = firsts[column] + hashed.astype(np.int64)
            rows[:, column] = np.where(is_known, numbers[at] - 1, other) if len(known) else other
            bad[:, column] = ~is_known if not room else False
        return int(bad.reshape(-1).argmax()) if bad.any() else -1


def hash_ids(ids: Numbers, field: int) -> Any:
    """The hash of ids of a field, uint64: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        h = ids.astype(np.uint64) + np.uint64((int(field) + 1) * 0x9E3779B97F4A7C15 % 2**64)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return h ^ (h >> np.uint64(31))


def slots_for(ids: int) -> int:
    """How many slots hold so many ids: a power of two, at most half of them used."""
    return max(_FEWEST, 1 << (2 * ids - 1).bit_length() if ids else 0)


def _slots(count: int) -> Numbers:
    slots = np.empty((count, 2), np.int64)  # numpy asks for huge pages here, and not for zeros
    slots.fill(0)
    return slots


def _check(ids: Numbers, fields: Numbers) -> None:
    check_array("ids", ids, ["int64"], None, is_written=False)
    check_array("fields", fields, ["int64"], (None,), is_written=False)
    if not len(fields) or (ids.shape[1:] or (1,)) != (len(fields),):
        raise ValueError(
            f"expected ids of shape (rows, {len(fields)}), a field each, found {ids.shape}"
        )
    if fields.min() < 0 or fields.max() >= FIELDS:
        raise ValueError(f"expected fields in 0..{FIELDS - 1}, found {fields}")
