"""Features by slot or by name, in memory or on disk. All processes of a host add rows to them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.features.files import remove_rows
from flatout.data.features.kept_rows import KeptRows, Opened, Where, opened
from flatout.data.features.row_log import Names, RowPart
from flatout.data.reading.block import Numbers
from flatout.data.reading.buffers import Buffers


class NamedStore(KeptRows):
    """Rows of tensors by names of 16 bytes, such as digests of the samples."""

    def __init__(self, opened: Opened) -> None:
        self._at: dict[bytes, int] = {}
        super().__init__(opened)

    @classmethod
    def open(
        cls,
        key: str,
        row: Sequence[RowPart],
        where: Where,
        budget: int | None = None,
        expected: int | None = None,
    ) -> NamedStore:
        """Open the store that `key` names, with rows that were stored earlier.

        If the cache folder cannot be written, the store is in memory, and `reason` says so.

        Args:
            key: result of `feature_key`; this and the next arguments are as for `FeatureStore`.
            expected: expected number of rows; None if not known.
        """
        return cls(opened(key, row, where, budget, expected))

    @property
    def kept(self) -> int:
        """Number of names with a row."""
        return len(self._at)

    def places(self, names: Sequence[bytes]) -> Numbers:
        """Return the positions of these names' rows for `get`, or -1 for names without a row.

        A row is compared with its checksum when this process first uses it. A row that differs
        counts as absent from then on, and may be put again. Rows may be from any process.

        Returns:
            int64 of shape (names,).
        """
        places = self._places_now(names)
        if (places < 0).any():
            self._later.wait(names)
            self._take_over(self._log.refresh())
            places = self._places_now(names)
        there = np.flatnonzero(places >= 0)
        damaged = there[~self._log.are_whole(places[there])]
        if len(damaged):
            with self._lock:
                lost = {names[at] for at in damaged.tolist()}
                for name in lost:
                    self._at.pop(name, None)
            self._tell_damaged(len(lost))
            places[damaged] = -1
        return places

    def get(self, places: Numbers, buffers: Buffers | None = None) -> list[torch.Tensor]:
        """Return the rows at positions that `places` returned.

        Returns:
            a tensor for each part of a row, of shape (count, ...), in this order: on the CPU, or on
            the device that also keeps rows.
        """
        return self._read(places, buffers)

    def put(self, names: Sequence[bytes], values: Sequence[torch.Tensor]) -> None:
        """Store rows while there is room; rows that are stored already do not change.

        If the disk or memory is full, one line reports it, and no more rows are stored.

        Args:
            names: names of the rows.
            values: a tensor for each part of a row, of shape (count, ...), on any device.

        Raises:
            ValueError: a tensor has another shape or dtype than its part.
        """
        first: dict[bytes, int] = {}
        for at, name in enumerate(names):
            first.setdefault(name, at)
        packed = np.frombuffer(b"".join(first), np.uint64).reshape(-1, 2)
        which = np.array([*first.values()], np.int64)
        self._keep(packed, values, which, lambda: self._places_now([*first]), [*first])

    def discard(self) -> None:
        """Close the store and remove its rows on disk, since no run will use them."""
        self.close()
        if self.where == "disk":
            remove_rows(self.name)

    def _places_now(self, names: Sequence[bytes]) -> Numbers:
        return np.array([self._at.get(name, -1) for name in names], np.int64)

    def _take_over(self, places: Numbers) -> None:
        data = np.ascontiguousarray(self._log.names(places)).tobytes()
        names = (data[start : start + 16] for start in range(0, len(data), 16))
        with self._lock:
            self._at.update(zip(names, places.tolist(), strict=True))


# Maximum number of damaged rows that one message names.
_NAMED = 3


class FeatureStore(KeptRows):
    """Rows of tensors by slot. The slot of a sample is its number * variants + its variant."""

    def __init__(self, opened: Opened, slots: int, names: Names | None) -> None:
        self._names = _names_of(slots) if names is None else names
        # Slots sorted by the first half of their names; None if rows are named by their slots.
        self._order = None if names is None else np.argsort(names[:, 0], kind="stable")
        self._places = np.full(slots, -1, np.int64)
        self._left = np.zeros(slots, bool)
        super().__init__(opened)

    @classmethod
    def open(
        cls,
        key: str,
        slots: int,
        row: Sequence[RowPart],
        where: Where = "auto",
        budget: int | None = None,
        names: Names | None = None,
    ) -> FeatureStore:
        """Open the store that `key` names, with rows that were stored earlier.

        The store may have room for fewer rows than there are slots. If the cache folder cannot be
        written, the store is in memory, and `reason` says so.

        Args:
            key: result of `feature_key`.
            slots: number of slots; an earlier run may have had fewer, or more.
            row: the tensors of a row.
            where: "memory", "disk" or "auto".
            budget: maximum bytes of the rows; None means the limits in `files.py`.
            names: name of each slot's row, uint64 of shape (slots, 2), if it is not the slot. By
                their names, rows of samples that have other numbers now are found, and rows of
                samples that were replaced are not.
        """
        return cls(opened(key, row, where, budget, slots), slots, names)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self._places)

    @property
    def kept(self) -> int:
        """Number of slots with a row."""
        return int((self._places >= 0).sum())

    def has(self, slots: Numbers) -> npt.NDArray[np.bool_]:
        """Return which of these slots have an undamaged row, written by any process.

        A row is compared with its checksum when this process first uses it. A row that differs is
        reported and counts as absent from then on; it may be put again.

        Args:
            slots: int64 of shape (count,).
        """
        slots = np.asarray(slots, np.int64)
        places = self._places[slots]
        if (places < 0).any():
            self._later.wait(slots.tolist())
            self._take_over(self._log.refresh())
            places = self._places[slots]
        there: npt.NDArray[np.bool_] = places >= 0
        good = self._log.are_whole(places[there])
        if not good.all():
            self._lose(slots[there][~good], places[there][~good])
            there[np.flatnonzero(there)[~good]] = False
        return there

    def get(self, slots: Numbers, buffers: Buffers | None = None) -> list[torch.Tensor]:
        """Return the rows of slots for which `has` returned True.

        Args:
            slots: int64 of shape (count,).
            buffers: source of the memory for the rows. None means the store's own buffers, which
                reuse memory once no tensor refers to it.

        Returns:
            a tensor for each part of a row, of shape (count, ...), in this order: on the CPU, or on
            the device that also keeps rows.

        Raises:
            KeyError: a slot has no row.
        """
        slots = np.asarray(slots, np.int64)
        places = self._places[slots]
        if (places < 0).any():
            raise KeyError(f"slot {int(slots[places < 0][0])} has no row")
        return self._read(places, buffers)

    def put(self, slots: Numbers, values: Sequence[torch.Tensor]) -> None:
        """Store rows while there is room; rows that are stored already do not change.

        If the disk or memory is full, one line reports it, and no more rows are stored.

        Args:
            slots: int64 of shape (count,).
            values: a tensor for each part of a row, of shape (count, ...), on any device.

        Raises:
            ValueError: a tensor has another shape or dtype than its part.
        """
        slots, first = np.unique(np.asarray(slots, np.int64), return_index=True)
        slots, first = slots[~self._left[slots]], first[~self._left[slots]]
        names = self._names[slots]
        self._keep(names, values, first, lambda: self._places[slots], slots.tolist())

    def leave(self, slots: Numbers) -> None:
        """Stop returning and keeping rows of these slots, since their samples were replaced."""
        with self._lock:
            self._left[slots] = True
            self._places[slots] = -1

    def _take_over(self, places: Numbers) -> None:
        names = self._log.names(places)
        at = names[:, 0]
        if self._order is not None:
            firsts = self._names[self._order, 0]
            within = np.minimum(np.searchsorted(firsts, at), max(0, len(firsts) - 1))
            at = self._order[within].astype(np.uint64) if len(firsts) else at
        slots = np.minimum(at, np.uint64(max(0, self.slots - 1))).astype(np.int64)
        if self.slots:
            mine = (self._names[slots] == names).all(1) & ~self._left[slots]
            with self._lock:
                self._places[slots[mine]] = places[mine]

    def _lose(self, slots: Numbers, places: Numbers) -> None:
        with self._lock:
            self._places[slots[self._places[slots] == places]] = -1
        some = ", ".join(f"{slot:,}" for slot in slots[:_NAMED])
        more = ", …" if len(slots) > _NAMED else ""
        self._tell_damaged(len(slots), f": {some}{more}")


def _names_of(slots: int) -> Names:
    names = np.zeros((slots, 2), np.uint64)
    names[:, 0] = np.arange(slots)
    return names
