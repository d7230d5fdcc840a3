"""Map from each id of a column to its row of a table: plain data that grows with each training.

Row 0 belongs to no id: ragged rows are padded with row 0. The next rows are shared by ids without
a row of their own (`Ids.buckets`), field by field. The last rows belong to single ids; an id keeps
the same row until it loses the row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from flatout.data.digests.digests import digest_of
from flatout.data.reading.block import Numbers
from flatout.data.reading.schema import Column, Ids
from flatout.errors import DataError
from flatout.kernels import IdNumbers, Items, hash_ids
from flatout.words import counted

# Version of the stored format of a map.
FORMAT = 1
_PARTS = ("fields", "ids", "rows", "counts", "seen")


class FieldPlaces(NamedTuple):
    """Field and shared table rows of each position in a column's rows.

    The arrays have one entry for all positions if the column has only one field.

    Attributes:
        fields: field of each position, int64.
        firsts: first table row that ids of the position's field share, int64.
        buckets: number of table rows that these ids share, int64.
        entries: for each field, the index of its entry in the list of `Ids`.
        shared: number of table rows before the first row of a single id.
    """

    fields: Numbers
    firsts: Numbers
    buckets: Numbers
    entries: tuple[int, ...]
    shared: int


def width_of(column: Column) -> int:
    """Return the number of positions in a row; 1 for single numbers and for ragged rows."""
    return column.shape[0] if column.shape else 1


def places_of(ladder: Sequence[Ids], width: int) -> FieldPlaces:
    fields = np.zeros(width, np.int64)
    entries: list[int] = []
    for number, item in enumerate(ladder):
        taken = {place for other in ladder for place in other.places or ()}
        own = [p for p in range(width) if p not in taken] if item.places is None else item.places
        for at, place in enumerate(own):
            if at == 0 or item.by_place:
                entries.append(number)
            fields[place] = len(entries) - 1
    buckets = np.array([ladder[entry].buckets for entry in entries], np.int64)
    firsts = 1 + np.concatenate([[0], np.cumsum(buckets)])
    first, room = firsts[:-1][fields], buckets[fields]
    if len(entries) == 1:  # one entry fits values of any shape
        fields, first, room = fields[:1], first[:1], room[:1]
    return FieldPlaces(fields, first, room, tuple(entries), int(firsts[-1]))


class Growth(NamedTuple):
    """Changes of a map by the ids of one training.

    Attributes:
        new: number of ids that got a row.
        gone: number of ids that lost their row.
        waiting: number of ids of this training without a row, since an id occurred too seldom or
            the table is full.
        hashed: number of ids of this training that share rows, in fields with several such rows.
        collide: `hashed` minus the number of shared rows that these ids use.
        old_rows: earlier indices of the table rows that stay, int64.
        new_rows: present indices of the same table rows, int64.
    """

    new: int = 0
    gone: int = 0
    waiting: int = 0
    hashed: int = 0
    collide: int = 0
    old_rows: Numbers = np.empty(0, np.int64)
    new_rows: Numbers = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class IdMap:
    """The rows of a column's ids.

    Attributes:
        column: name of the column.
        ladder: entries (`Ids`) of the schema about ids.
        width: number of positions in a row of the column.
        items: fields, ids and rows of all known ids, in ascending order of field, then id. The row
            of an id without a row is -1.
        counts: number of times that each id occurred, int64.
        seen: the last training, counted from 1, in which each id occurred, int64.
        size: number of rows of the table.
        trainings: number of trainings whose ids were counted.
        learned_from: digest of the data of the last training.
    """

    column: str
    ladder: tuple[Ids, ...]
    width: int
    items: Items
    counts: Numbers
    seen: Numbers
    size: int
    trainings: int = 0
    learned_from: str = ""

    @classmethod
    def empty(cls, column: Column) -> IdMap:
        """Return a map without ids."""
        none = np.empty(0, np.int64)
        width = width_of(column)
        size = places_of(column.ids, width).shared
        return cls(column.name, column.ids, width, Items(none, none, none), none, none, size)

    def as_column(self) -> Column:
        """Return a column of these ids, for data whose schema does not state them."""
        return Column(name=self.column, dtype="int64", shape=(self.width,), ids=self.ladder)

    def of(self, column: Column) -> IdMap:
        """Return the same rows for the ids of another column, whose positions are one field."""
        return replace(self, column=column.name, width=width_of(column))

    @cached_property
    def places(self) -> FieldPlaces:
        """Field and shared table rows of each position in a row."""
        return places_of(self.ladder, self.width)

    @cached_property
    def _numbers(self) -> IdNumbers:
        own = self.items.numbers >= 0
        fields, ids, rows = (part[own] for part in self.items)
        numbers = IdNumbers(len(ids))
        for field in np.unique(fields):
            mine = fields == field
            numbers.add(np.ascontiguousarray(ids[mine]), np.array([field]), rows[mine] + 1)
        return numbers

    def __getstate__(self) -> dict[str, Any]:
        # Another process makes its own hash table.
        return {name: value for name, value in vars(self).items() if name != "_numbers"}

    def rows_of(self, ids: Numbers, out: Numbers) -> int:
        """Write the rows of ids, C-contiguous int64 of shape (rows, width) or (values,).

        Returns:
            position, in the flat ids, of the first id without a row; -1 if all ids have a row.
        """
        fields, firsts, buckets, _, _ = self.places
        if len(fields) == 1:
            ids, out = ids.reshape(-1), out.reshape(-1)
        return self._numbers.rows(ids, fields, firsts, buckets, out)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the row of each id."""
        whole = hashlib.sha256()
        for part in self.items:
            whole.update(np.ascontiguousarray(part).data)
        return digest_of(json.dumps(self._header()), whole.hexdigest())

    # -- growing ---------------------------------------------------------------------------------

    def with_ladder(self, column: Column) -> IdMap:
        """Return the same ids under the schema's present entries, which may have other numbers.

        Raises:
            DataError: the schema has other fields, so that ids are not comparable.
        """
        if not column.ids:
            return self
        width = width_of(column)
        mine, theirs = self.places, places_of(column.ids, width)
        if len(mine.fields) != len(theirs.fields) or (mine.fields != theirs.fields).any():
            own, other = (counted(len(item.entries), "field") for item in (mine, theirs))
            raise DataError(
                f"column {self.column!r}: the model's ids are of {own} in rows of {self.width}, "
                f"and the schema states {other} in rows of {width}",
                do="state places and by_place as in the schema of the earlier training, or train "
                "without warm_start",
            )
        shift = theirs.shared - mine.shared
        rows = np.where(self.items.numbers < 0, -1, self.items.numbers + shift)
        items = self.items._replace(numbers=rows)
        return replace(self, ladder=column.ids, items=items, size=self.size + shift)

    def grown(self, column: Column, found: Items, learned_from: str = "") -> tuple[IdMap, Growth]:
        """Return the map after a training whose ids were counted, and its changes.

        The result depends only on the counts, not on the order of ids. New ids first get the rows
        of removed ids, then new rows. The most frequent new ids come first.

        Args:
            column: column of the schema, with its present entries about ids.
            found: fields, ids and counts.
            learned_from: digest of the data.
        """
        before = self.with_ladder(column)
        now = self.trainings + 1
        places = before.places
        known = _merged_ids(before, found, now)
        entry = np.array(places.entries, np.int64)[known.fields]
        keeps = np.zeros(len(entry), bool)
        gets = np.zeros(len(entry), bool)
        for number, item in enumerate(before.ladder):
            mine = entry == number
            if item.vocabulary == "none":
                continue
            stays = mine & ~known.is_forgotten(item.forget, now)
            has = stays & (known.rows >= 0)
            closed = item.vocabulary == "fixed" and self.trainings > 0
            wants = has if closed else has | (stays & (known.counts >= item.admit))
            keeps |= has if closed else stays
            gets |= _most_often(known, wants, item.most)
        is_new, is_gone = gets & (known.rows < 0), ~gets & (known.rows >= 0)
        rows = np.where(gets, known.rows, -1)
        free = np.ones(before.size, bool)
        free[: places.shared] = False
        free[rows[rows >= 0]] = False
        new = np.flatnonzero(is_new)
        new = new[np.lexsort((known.ids[new], known.fields[new], -known.counts[new]))]
        holes = np.flatnonzero(free)[: len(new)]
        more = len(new) - len(holes)
        rows[new] = np.concatenate([holes, np.arange(before.size, before.size + more)])
        items = Items(known.fields[keeps], known.ids[keeps], rows[keeps])
        after = replace(
            before,
            items=items,
            counts=known.counts[keeps],
            seen=known.seen[keeps],
            size=before.size + more,
            trainings=now,
            learned_from=learned_from,
        )
        stay = np.flatnonzero(gets & (known.rows >= 0))
        old_rows, new_rows = _moved(self, before, known.rows[stay])
        waits = keeps & ~gets & (known.seen == now)
        hashed, collide = _hashed(places, before.ladder, known, ~gets & (known.seen == now))
        counts = (int(is_new.sum()), int(is_gone.sum()), int(waits.sum()), hashed, collide)
        return after, Growth(*counts, old_rows, new_rows)

    def merged(self, other: IdMap) -> IdMap:
        """Merge two maps that grew separately, such as those of two days.

        Ids of this map keep their rows. Ids with a row only in the other map get new rows, in the
        order of the rows in the other map. Counts are added.

        Raises:
            DataError: the maps have other columns or fields.
        """
        if (self.column, self.ladder, self.width) != (other.column, other.ladder, other.width):
            raise DataError(
                f"maps of ids are merged where their schema is the same, found those of "
                f"{self.column!r} and {other.column!r}, or of different fields"
            )
        items = Items(other.items.fields, other.items.ids, other.counts)
        last = max(self.trainings, other.trainings)
        known = _merged_ids(self, items, last)
        key = np.stack([known.fields, known.ids])
        mine, theirs = _index(key, self.items), _index(key, other.items)
        result = np.zeros(len(known.ids), np.int64)
        result[mine] = self.seen
        result[theirs] = np.maximum(result[theirs], other.seen)
        of_other = np.full(len(known.ids), -1, np.int64)
        of_other[theirs] = other.items.numbers
        rows = known.rows.copy()
        new = np.flatnonzero((rows < 0) & (of_other >= 0))
        new = new[np.argsort(of_other[new])]
        rows[new] = np.arange(self.size, self.size + len(new))
        return replace(
            self,
            items=Items(known.fields, known.ids, rows),
            counts=known.counts,
            seen=result,
            size=self.size + len(new),
            trainings=last,
        )

    # -- as data ---------------------------------------------------------------------------------

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "ladder": [item.model_dump(mode="json", exclude_defaults=True) for item in self.ladder],
            "width": self.width,
            "size": self.size,
            "trainings": self.trainings,
            "learned_from": self.learned_from,
            # Readers without Flatout need these entries: see docs/data/ids.md.
            "fields": self.places.fields.tolist(),
            "firsts": self.places.firsts.tolist(),
            "buckets": self.places.buckets.tolist(),
        }

    def as_data(self) -> tuple[dict[str, Any], dict[str, Numbers]]:
        """Return the header, as JSON, and the arrays, int64 of shape (ids,) each."""
        arrays = (*self.items, self.counts, self.seen)
        return self._header(), dict(zip(_PARTS, arrays, strict=True))

    @classmethod
    def of_data(cls, column: str, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> IdMap:
        """Make a map from the results of `as_data`.

        Raises:
            DataError: the map has a later format, or is damaged.
        """
        try:
            version = int(header["format"])
            if version > FORMAT:
                raise DataError(
                    f"the map of the ids of column {column!r} is of format {version}, and this "
                    f"version of Flatout reads up to {FORMAT}",
                    do="use the version that wrote it, or a later one",
                )
            parts = [np.ascontiguousarray(arrays[name], dtype=np.int64) for name in _PARTS]
            made = cls(
                column,
                tuple(Ids.model_validate(item) for item in header["ladder"]),
                int(header["width"]),
                Items(*parts[:3]),
                parts[3],
                parts[4],
                int(header["size"]),
                int(header["trainings"]),
                str(header["learned_from"]),
            )
            rows = parts[2]
            wrong = len({part.shape for part in parts}) != 1 or rows.ndim != 1
            if wrong or (len(rows) and not (rows.min() >= -1 and rows.max() < made.size)):
                raise ValueError("its arrays do not fit each other")
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the map of the ids of column {column!r} cannot be read: {error}"
            ) from error
        return made


class _KnownIds(NamedTuple):
    """Known ids, in ascending order of field, then id; int64 of shape (ids,) each."""

    fields: Numbers
    ids: Numbers
    rows: Numbers
    counts: Numbers
    seen: Numbers

    def is_forgotten(self, after: int | None, now: int) -> Any:
        return np.zeros(len(self.ids), bool) if after is None else now - self.seen >= after


def _merged_ids(before: IdMap, items: Items, now: int) -> _KnownIds:
    fields = np.concatenate([before.items.fields, items.fields])
    ids = np.concatenate([before.items.ids, items.ids])
    old = len(before.counts)
    order = np.lexsort((ids, fields))  # a stable sort: of equal ids, the map's comes first
    fields, ids = fields[order], ids[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = (np.diff(fields) != 0) | (ids[1:] != ids[:-1])
    starts = np.flatnonzero(is_first)
    fresh = np.full(len(items.ids), -1, np.int64)
    rows = np.concatenate([before.items.numbers, fresh])[order][starts]
    counts = np.concatenate([before.counts, items.numbers])[order]
    counts = np.add.reduceat(counts, starts) if len(starts) else counts
    result = np.where(order < old, np.append(before.seen, 0)[np.minimum(order, old)], now)
    result = np.maximum.reduceat(result, starts) if len(starts) else result
    return _KnownIds(fields[starts], ids[starts], rows, counts, result)


def _index(key: Numbers, items: Items) -> Numbers:
    kind = np.dtype([("field", np.int64), ("id", np.int64)])
    among, wanted = np.empty(key.shape[1], kind), np.empty(len(items.ids), kind)
    among["field"], among["id"] = key
    wanted["field"], wanted["id"] = items.fields, items.ids
    return np.searchsorted(among, wanted)


def _most_often(known: _KnownIds, wants: Any, most: int | None) -> Any:
    chosen = np.flatnonzero(wants)
    if most is None or len(chosen) <= most:
        return wants
    order = np.lexsort(
        (
            known.ids[chosen],
            known.fields[chosen],
            known.rows[chosen] < 0,
            -known.seen[chosen],
            -known.counts[chosen],
        )
    )
    kept = np.zeros(len(wants), bool)
    kept[chosen[order[:most]]] = True
    return kept


def _moved(first: IdMap, before: IdMap, rows: Numbers) -> tuple[Numbers, Numbers]:
    shift = before.places.shared - first.places.shared
    old, new = [np.zeros(1, np.int64), rows - shift], [np.zeros(1, np.int64), rows]
    for item, other in zip(_shared(first), _shared(before), strict=True):
        if item[1] == other[1]:
            old.append(np.arange(item[0], item[0] + item[1]))
            new.append(np.arange(other[0], other[0] + other[1]))
    return np.concatenate(old), np.concatenate(new)


def _shared(map: IdMap) -> list[tuple[int, int]]:
    places = map.places
    result = {int(f): (int(a), int(b)) for f, a, b in zip(*places[:3], strict=True)}
    return [result[number] for number in range(len(places.entries))]


def _hashed(
    places: FieldPlaces, ladder: Sequence[Ids], known: _KnownIds, shares: Any
) -> tuple[int, int]:
    ids = used = 0
    rooms = {int(f): int(b) for f, b in zip(places.fields, places.buckets, strict=True)}
    for number, room in rooms.items():
        own = known.ids[shares & (known.fields == number)]
        if room > 1 and len(own):
            ids += len(own)
            used += len(np.unique(hash_ids(own, number) % np.uint64(room)))
    return ids, ids - used
