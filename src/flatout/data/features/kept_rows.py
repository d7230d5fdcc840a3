"""Rows that are kept while there is room, whatever they are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Literal, NamedTuple

import numpy as np
import torch

from flatout.cache_folder import cache_folder
from flatout.console import say_as_is
from flatout.data.block import Numbers
from flatout.data.features.files import disk_files, has_rows, memory_files
from flatout.data.features.key import VERSION
from flatout.data.features.room import disk_room, memory_room
from flatout.data.features.row_log import Files, Names, RowLog, RowPart
from flatout.words import counted, size_words

Where = Literal["auto", "memory", "disk"]
# Whether there is room is looked at once in so many bytes that are put.
_LOOK_EVERY = 64 << 20


class Opened(NamedTuple):
    """What a store begins with.

    Attributes:
        log: its rows.
        name: of its files in the cache folder.
        free: bytes that are free where it is, within the budget.
        reason: why it is there, for people.
    """

    log: RowLog
    name: str
    free: int
    reason: str


class KeptRows:
    """Rows of tensors, shared by all processes of a host that open the same.

    What is kept on the disk stays for later runs; memory holds rows while a process lives that has
    them, and finds them while the first one does. Several threads and processes may call at once:
    each finds what the others have put.

    Attributes:
        name: of its files: the same for the same key and form of rows, on any host.
        where: "memory" or "disk".
        free: bytes that were free there when it was opened, within the budget.
        reason: why it is there, for people.
        say: gets a line for people, such as that a row is damaged.
        say_full: gets the line that nothing more is kept; None means `say`.
        is_full: whether nothing more is kept.
    """

    def __init__(self, opened: Opened) -> None:
        self._log = opened.log
        self.name = opened.name
        self.where: Literal["memory", "disk"] = "disk" if self._log.is_on_disk else "memory"
        self.free = opened.free
        self.reason = opened.reason
        self.say: Callable[[str], None] = say_as_is
        self.say_full: Callable[[str], None] | None = None
        self.is_full = False
        self._until_looked = 0
        self._lock = RLock()
        self._take_over(self._log.kept())
        self._most = len(self._log) + opened.free // self._log.stride

    @property
    def kept(self) -> int:
        """How many rows there are."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """What these rows take."""
        return self.kept * self._log.stride

    def _take_over(self, places: Numbers) -> None:
        """Note what these rows of the log are of."""
        raise NotImplementedError

    def _keep(
        self,
        names: Names,
        values: Sequence[torch.Tensor],
        at: Numbers,
        places_now: Callable[[], Numbers],
    ) -> None:
        """Keep rows while there is room; those that are there already stay as they are.

        Args:
            names: of the rows, each once.
            values: a tensor for each part of a row.
            at: which row of these each name has.
            places_now: gives each name's place in the log, -1 without one.
        """
        if self.is_full or not len(names):
            return
        try:
            with self._log.alone():
                self._take_over(self._log.refresh())
                new = np.flatnonzero(places_now() < 0)
                new = new[: self._room_for(len(new))]
                if len(new):
                    chosen = [_rows_of(value, at[new]) for value in values]
                    self._take_over(self._log.append(names[new], chosen))
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

    def _stop(self, why: str) -> None:
        if not self.is_full:
            self.is_full = True
            say = self.say_full or self.say
            say(f"features: {why}; the others are computed each time")

    def _tell_damaged(self, count: int, which: str = "") -> None:
        place = f" on {self.where}" if self.where == "disk" else ""
        self.say(
            f"features: {counted(count, 'row')}{place} differ from their checksums and are "
            f"computed again{which}"
        )

    def flush(self) -> None:
        """Make what is kept on the disk last through a power cut; a kill loses nothing of it."""
        if self.where == "disk":
            self._log.flush()

    def close(self) -> None:
        """Let go of it; what was given stays valid."""
        self._log.close()


def opened(
    key: str,
    row: Sequence[RowPart],
    where: Where = "auto",
    budget: int | None = None,
    expected: int | None = None,
) -> Opened:
    """The rows of what `key` names, with what was kept of it before.

    Args:
        key: as `feature_key` gives it.
        row: what a row holds.
        where: "memory", "disk", or "auto": the disk where some of it is there already or all of
            it fits, else memory where all fits, else where there is more room.
        budget: bytes that it may take; None means what is free on the disk, and half of the memory
            that is free.
        expected: how many rows there will be; None where that is not known.
    """
    stride = RowLog.stride_of(row)
    form = repr([VERSION, key, *map(tuple, row)])
    name = hashlib.sha256(form.encode()).hexdigest()[:16]
    room = {"memory": memory_room(), "disk": disk_room()}
    if budget is not None:
        room = {kind: min(budget, free) for kind, free in room.items()}
    size = (expected or 0) * stride
    files, reason = _files(name, _chosen_of(where, size, room, name))
    kind = "disk" if files.on_disk else "memory"
    told = f"{size_words(room[kind])} free {'on disk' if files.on_disk else 'in memory'}{reason}"
    if expected is not None:
        told = f"{counted(expected, 'row')} take {size_words(size)}, {told}"
    return Opened(RowLog(row, files, expected or 0), name, room[kind], told)


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
