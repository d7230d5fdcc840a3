"""Features by slot, in memory or on the disk; filled bit by bit, by all processes of a host."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from flatout.console import say_as_is
from flatout.data.block import Numbers
from flatout.data.features.kept_rows import KeptRows, Names, RowPart
from flatout.measure import available_bytes
from flatout.words import counted, size_words

Where = Literal["auto", "memory", "disk"]
# Of the free memory, what a store may take where no one said how much.
_SHARE = 0.5
# So much memory stays free; looked at once in so many bytes that were kept.
_RESERVE, _LOOK_EVERY = 512 << 20, 64 << 20


class FeatureStore:
    """Rows of tensors by slot. Several threads and processes may call at once.

    A slot is sample number * variants + variant. Memory is what the calls take alone: rows that are
    kept in memory are gone with the process.

    Attributes:
        where: "memory" or "disk".
        kept: how many slots have a row.
        bytes: that these take.
        most: rows that there is room for; those that come later are not kept.
        reason: why it is there, and what it takes.
    """

    def __init__(self, rows: KeptRows, slots: int, where: Where, most: int, reason: str) -> None:
        self.where: Where = where
        self.most = most
        self.reason = reason
        self.say: Callable[[str], None] = say_as_is
        self._rows = rows
        self._places = np.full(slots, -1, np.int64)
        self._is_full = False
        self._looked = 0
        self._lock = RLock()
        self._refresh()

    @classmethod
    def open(
        cls,
        key: str,
        slots: int,
        row: Sequence[RowPart],
        where: Where = "auto",
        budget: int | None = None,
    ) -> FeatureStore:
        """A store of what `key` names, with what was kept of it before.

        Args:
            key: as `feature_key` gives it.
            slots: how many there are; a store of a run before may have had fewer.
            row: what a row holds.
            where: "memory", "disk", or "auto".
            budget: bytes that it may take; None means half of the memory that is free.
        """
        room = int(available_bytes() * _SHARE) if budget is None else budget
        stride = KeptRows.stride_of(row)
        most = min(slots, room // stride)
        rows = KeptRows(row, _memory_file(), _memory_file())
        reason = (
            f"{counted(slots, 'row')} take {size_words(slots * stride)}, memory has "
            f"{size_words(room)} for them"
        )
        return cls(rows, slots, "memory", most, reason)

    @property
    def slots(self) -> int:
        """How many there are."""
        return len(self._places)

    @property
    def kept(self) -> int:
        """How many slots have a row."""
        return int((self._places >= 0).sum())

    @property
    def bytes(self) -> int:
        """What the rows take that are kept."""
        return self.kept * self._rows.stride

    def has(self, slots: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these slots have a row that is what was put there, by any process.

        A row is compared with its checksum when it is asked for the first time in this process;
        one that differs counts as absent from then on, and may be put again.

        Args:
            slots: int64 of shape (count,).
        """
        slots = np.asarray(slots, np.int64)
        with self._lock:
            if (self._places[slots] < 0).any():
                self._refresh()
            places = self._places[slots]
        there: npt.NDArray[np.bool_] = places >= 0
        good = self._rows.are_whole(places[there])
        if not good.all():
            self._lose(slots[there][~good])
            there[np.flatnonzero(there)[~good]] = False
        return there

    def get(self, slots: Numbers) -> list[torch.Tensor]:
        """Rows of slots that `has` said to have one: a tensor for each part, in this order.

        Raises:
            KeyError: a slot has no row.
        """
        places = self._places[np.asarray(slots, np.int64)]
        if (places < 0).any():
            raise KeyError(f"slot {int(np.asarray(slots)[places < 0][0])} has no row")
        return self._rows.read(places)

    def put(self, slots: Numbers, values: Sequence[torch.Tensor]) -> None:
        """Keep rows, where there is room; those that are there already stay as they are.

        Args:
            slots: int64 of shape (count,).
            values: a tensor for each part of a row, of shape (count, ...), on any device.
        """
        slots = np.asarray(slots, np.int64)
        if self._is_full or not len(slots):
            return
        with self._lock, self._rows.alone():
            self._refresh()
            slots, first = np.unique(slots, return_index=True)
            new = self._places[slots] < 0
            room = max(0, self.most - len(self._rows))
            fresh, slots = first[new][:room], slots[new][:room]
            if len(fresh):
                self._keep(slots, [_chosen(value, fresh) for value in values])
            if room < new.sum():
                self._stop(f"{self.where} has room for {self.most:,} of {self.slots:,} rows")

    def _keep(self, slots: Numbers, values: Sequence[torch.Tensor]) -> None:
        try:
            self._look_for_room(len(slots) * self._rows.stride)
            if not self._is_full:
                self._places[slots] = self._rows.append(_names_of(slots), values)
        except OSError as error:
            self._stop(f"rows cannot be kept: {error.strerror or error}")

    def _look_for_room(self, more: int) -> None:
        self._looked -= more
        if self._looked < 0:
            self._looked = _LOOK_EVERY
            if available_bytes() < _RESERVE + more:
                self._stop("memory is nearly used up")

    def flush(self) -> None:
        """Bring all that is kept to the disk, where it is kept there."""

    def close(self) -> None:
        """Let go of it; what was given stays valid."""
        self._rows.close()

    def _refresh(self) -> None:
        """Learn what other processes have kept."""
        names = self._rows.refresh()
        slots = names[:, 0].astype(np.int64)
        places = np.arange(len(self._rows) - len(names), len(self._rows))
        mine = slots < len(self._places)
        self._places[slots[mine]] = places[mine]

    def _lose(self, slots: Numbers) -> None:
        with self._lock:
            self._places[slots] = -1
        self.say(f"features: {counted(len(slots), 'row')} damaged, computed again: {slots[0]}")

    def _stop(self, why: str) -> None:
        if not self._is_full:
            self._is_full = True
            self.say(f"features: {why}; the others are computed each time")


def _chosen(value: torch.Tensor, at: Numbers) -> torch.Tensor:
    if len(at) == len(value) and (at == np.arange(len(at))).all():
        return value.detach()
    return value.detach().index_select(0, torch.from_numpy(at).to(value.device))


def _names_of(slots: Numbers) -> Names:
    names = np.zeros((len(slots), 2), np.uint64)
    names[:, 0] = slots
    return names


def _memory_file() -> int:
    """Descriptor of a file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("flatout-features", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
