"""Features by slot, in memory or on the disk; filled bit by bit, by all processes of a host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from flatout.cache_folder import cache_folder
from flatout.console import say_as_is
from flatout.data.block import Numbers
from flatout.data.buffers import Buffers
from flatout.data.features.files import disk_files, has_rows, memory_files
from flatout.data.features.key import VERSION
from flatout.data.features.room import disk_room, memory_room
from flatout.data.features.row_log import Files, Names, RowLog, RowPart
from flatout.words import counted, size_words

Where = Literal["auto", "memory", "disk"]
# Whether there is room is looked at once in so many bytes that are put.
_LOOK_EVERY = 64 << 20
# Of rows that are damaged, so many are named.
_NAMED = 3


class FeatureStore:
    """Rows of tensors by slot, shared by all processes of a host that open the same.

    A slot is sample number * variants + variant. What is kept on the disk stays for later runs;
    memory holds rows while a process lives that has them, and finds them while the first one does.
    Several threads and processes may call at once: each finds what the others have put.

    Attributes:
        where: "memory" or "disk".
        free: bytes that were free there when it was opened, within the budget.
        reason: why it is there, for people.
        say: gets a line for people, such as that the disk is full.
    """

    def __init__(
        self, log: RowLog, slots: int, names: Names | None, free: int, reason: str
    ) -> None:
        self.where: Literal["memory", "disk"] = "disk" if log.is_on_disk else "memory"
        self.free = free
        self.reason = reason
        self.say: Callable[[str], None] = say_as_is
        self._log = log
        self._names = _names_of(slots) if names is None else names
        # Slots by the first half of their names; None where that is their number.
        self._order = None if names is None else np.argsort(names[:, 0], kind="stable")
        self._places = np.full(slots, -1, np.int64)
        self._is_full = False
        self._until_looked = 0
        self._lock = RLock()
        self._take_over(log.kept())
        self._most = len(log) + free // log.stride

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
            where: "memory", "disk", or "auto": the disk where some of it is there already or all
                of it fits, else memory where all fits, else where there is more room.
            budget: bytes that it may take; None means what is free on the disk, and half of the
                memory that is free.
            names: what each slot's row is known by, uint64 of shape (slots, 2), where that is more
                than the slot: so rows of samples that have moved are found, and those of samples
                that are others by now are not.
        """
        stride = RowLog.stride_of(row)
        form = repr([VERSION, key, *map(tuple, row)])
        name = hashlib.sha256(form.encode()).hexdigest()[:16]
        room = {"memory": memory_room(), "disk": disk_room()}
        if budget is not None:
            room = {kind: min(budget, free) for kind, free in room.items()}
        size = f"{counted(slots, 'row')} take {size_words(slots * stride)}"
        files, reason = _files(name, _chosen_of(where, slots * stride, room, name))
        kind = "disk" if files.on_disk else "memory"
        told = (
            f"{size}, {size_words(room[kind])} free {'on disk' if files.on_disk else 'in memory'}"
        )
        return cls(RowLog(row, files, slots), slots, names, room[kind], told + reason)

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
        """What these rows take."""
        return self.kept * self._log.stride

    @property
    def whole_bytes(self) -> int:
        """What rows for all slots take."""
        return self.slots * self._log.stride

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
            a tensor on the CPU for each part of a row, of shape (count, ...), in this order.

        Raises:
            KeyError: a slot has no row.
        """
        slots = np.asarray(slots, np.int64)
        places = self._places[slots]
        if (places < 0).any():
            raise KeyError(f"slot {int(slots[places < 0][0])} has no row")
        return self._log.read(places, buffers)

    def put(self, slots: Numbers, values: Sequence[torch.Tensor]) -> None:
        """Keep rows while there is room; those that are there already stay as they are.

        Where the disk or memory is full, that is said once, and nothing more is kept.

        Args:
            slots: int64 of shape (count,).
            values: a tensor for each part of a row, of shape (count, ...), on any device.

        Raises:
            ValueError: a tensor has another shape or dtype than its part.
        """
        if self._is_full or not len(slots):
            return
        slots, first = np.unique(np.asarray(slots, np.int64), return_index=True)
        try:
            with self._log.alone():
                self._take_over(self._log.refresh())
                is_new = self._places[slots] < 0
                room = self._room_for(int(is_new.sum()))
                slots, first = slots[is_new][:room], first[is_new][:room]
                if len(slots):
                    chosen = [_rows_of(value, first) for value in values]
                    places = self._log.append(self._names[slots], chosen)
                    self._take_over(places)
        except OSError as error:
            self._stop(f"nothing more can be kept: {error.strerror or error}")

    def _room_for(self, count: int) -> int:
        """So many of some new rows as there is room for."""
        room = self._most - len(self._log)
        self._until_looked -= count * self._log.stride
        if self._until_looked < 0:
            self._until_looked = _LOOK_EVERY
            free = disk_room() if self.where == "disk" else memory_room(share=1)
            room = min(room, free // self._log.stride)
        if room < count:
            self._stop(f"{self.where} has no room for more than {len(self._log) + room:,} rows")
        return room

    def flush(self) -> None:
        """Make what is kept on the disk last through a power cut; a kill loses nothing of it."""
        if self.where == "disk":
            self._log.flush()

    def close(self) -> None:
        """Let go of it; what was given stays valid."""
        self._log.close()

    def _take_over(self, places: Numbers) -> None:
        """Note which slots these rows belong to, if any."""
        names = self._log.names(places)
        at = names[:, 0]
        if self._order is not None:
            firsts = self._names[self._order, 0]
            within = np.minimum(np.searchsorted(firsts, at), max(0, len(firsts) - 1))
            at = self._order[within].astype(np.uint64) if len(firsts) else at
        slots = np.minimum(at, np.uint64(max(0, self.slots - 1))).astype(np.int64)
        if self.slots:
            mine = (self._names[slots] == names).all(1)
            with self._lock:
                self._places[slots[mine]] = places[mine]

    def _lose(self, slots: Numbers, places: Numbers) -> None:
        with self._lock:
            self._places[slots[self._places[slots] == places]] = -1
        some = ", ".join(f"{slot:,}" for slot in slots[:_NAMED])
        more = ", …" if len(slots) > _NAMED else ""
        place = f" on {self.where}" if self.where == "disk" else ""
        self.say(
            f"features: {counted(len(slots), 'row')}{place} differ from their checksums and are "
            f"computed again: {some}{more}"
        )

    def _stop(self, why: str) -> None:
        if not self._is_full:
            self._is_full = True
            self.say(f"features: {why}; the others are computed each time")


def _chosen_of(where: Where, size: int, room: dict[str, int], name: str) -> str:
    if where != "auto":
        return where
    if has_rows(name) or size <= room["disk"]:
        return "disk"
    return "memory" if size <= room["memory"] else max(room, key=lambda kind: room[kind])


def _files(name: str, where: str) -> tuple[Files, str]:
    """The files, and why they are in memory where the disk was wanted."""
    if where == "disk":
        try:
            return disk_files(name), ""
        except OSError as error:
            why = f"{cache_folder()} cannot be written: {error.strerror or error}"
            return memory_files(name), f"; {why}"
    return memory_files(name), ""


def _rows_of(value: torch.Tensor, at: Numbers) -> torch.Tensor:
    if len(at) == len(value) and (at == np.arange(len(at))).all():
        return value.detach()
    return value.detach().index_select(0, torch.from_numpy(at).to(value.device))


def _names_of(slots: int) -> Names:
    names = np.zeros((slots, 2), np.uint64)
    names[:, 0] = np.arange(slots)
    return names
