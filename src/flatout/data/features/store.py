"""Features by slot, in memory or on the disk; filled bit by bit, by all processes of a host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.block import Numbers
from flatout.data.buffers import Buffers
from flatout.data.features.kept_rows import KeptRows, Opened, Where, opened
from flatout.data.features.row_log import Names, RowPart

# Of rows that are damaged, so many are named.
_NAMED = 3


class FeatureStore(KeptRows):
    """Rows of tensors by slot: a slot is sample number * variants + variant."""

    def __init__(self, opened: Opened, slots: int, names: Names | None) -> None:
        self._names = _names_of(slots) if names is None else names
        # Slots by the first half of their names; None where that is their number.
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
        """A store of what `key` names, with what was kept of it before.

        It may have room for fewer rows than there are slots. Where the cache folder cannot be
        written it is in memory, and `reason` says so.

        Args:
            key: as `feature_key` gives it.
            slots: how many there are; a run before may have had fewer, or more.
            row: what a row holds.
            where: as `opened` takes it.
            budget: likewise.
            names: what each slot's row is known by, uint64 of shape (slots, 2), where that is more
                than the slot: so rows of samples that have moved are found, and those of samples
                that are others by now are not.
        """
        return cls(opened(key, row, where, budget, slots), slots, names)

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._places)

    @property
    def kept(self) -> int:
        """How many slots have a row."""
        return int((self._places >= 0).sum())

    def has(self, slots: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these slots have a row that is what was put there, by any process.

        A row is compared with its checksum when it is asked for first in this process; one that
        differs is named, counts as absent from then on, and may be put again.

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
        """Rows of slots of which `has` said that they are there.

        Args:
            slots: int64 of shape (count,).
            buffers: where their memory comes from; None means the store's own, which uses memory
                again that no tensor shows any longer.

        Returns:
            a tensor for each part of a row, of shape (count, ...), in this order: on the CPU, or on
            the device that rows lie on.

        Raises:
            KeyError: a slot has no row.
        """
        slots = np.asarray(slots, np.int64)
        places = self._places[slots]
        if (places < 0).any():
            raise KeyError(f"slot {int(slots[places < 0][0])} has no row")
        return self._read(places, buffers)

    def put(self, slots: Numbers, values: Sequence[torch.Tensor]) -> None:
        """Keep rows while there is room; those that are there already stay as they are.

        Where the disk or memory is full, that is said once, and nothing more is kept.

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
        """Neither give nor keep rows of these slots any more: their samples are others by now."""
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
