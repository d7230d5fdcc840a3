"""Rows that are stored while there is room. Subclasses define how rows are named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore, RLock
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from flatout.cache_folder import cache_folder
from flatout.console import say_as_is
from flatout.data.features.device_rows import DeviceRows
from flatout.data.features.files import (
    DEVICE_SHARE,
    disk_files,
    disk_room,
    has_rows,
    memory_files,
    memory_room,
)
from flatout.data.features.key import VERSION
from flatout.data.features.row_log import Files, Names, RowLog, RowPart
from flatout.data.reading.block import Numbers
from flatout.data.reading.buffers import Buffers
from flatout.words import counted, size_words

# Maximum number of batches of rows that may wait for the disk. Each is in pinned memory while it
# waits.
_WAITING = 4


class DeferredWriter:
    """Writes batches of rows in their order, each after its device has computed the rows."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._room = BoundedSemaphore(_WAITING)
        self._latest: Future[None] | None = None
        self._waiting: set[Hashable] = set()
        self._error: BaseException | None = None

    def write(
        self,
        names: Collection[Hashable],
        values: Sequence[torch.Tensor],
        write: Callable[[list[torch.Tensor]], None],
    ) -> None:
        """Write rows later. Changes of the values after this call do not change the rows."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "flatout-features")
        self._room.acquire()
        copies = [_copied(value) for value in values]
        devices = {value.device for value in values if value.device.type != "cpu"}
        events = [torch.accelerator.current_stream(device).record_event() for device in devices]
        self._waiting.update(names)
        self._latest = self._pool.submit(self._run, [*names], copies, events, write)

    def _run(self, names: list[Hashable], copies: list[Any], events: list[Any], write: Any) -> None:
        try:
            for event in events:
                event.synchronize()
            write(copies)
        except BaseException as error:
            self._error = error
        finally:
            self._waiting.difference_update(names)
            self._room.release()

    def wait(self, names: Collection[Hashable] | None = None) -> None:
        """Wait until all rows are written, or until rows of these names are."""
        if self._latest is None or (names is not None and self._waiting.isdisjoint(names)):
            return
        self._latest.result()
        error, self._error = self._error, None
        if error is not None:
            raise error


def _copied(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    if value.device.type == "cpu":
        return value.clone()
    pinned = torch.empty_like(value, device="cpu", pin_memory=True)
    return pinned.copy_(value, non_blocking=True)


Where = Literal["auto", "memory", "disk"]
# Bytes written between two checks of the free room.
_LOOK_EVERY = 64 << 20


class Opened(NamedTuple):
    """Rows of a store when it is opened.

    Attributes:
        log: log of the rows.
        name: name of the files in the cache folder.
        free: bytes that are free on disk or in memory, within the budget.
        reason: why rows are stored on disk or in memory, for the user.
    """

    log: RowLog
    name: str
    free: int
    reason: str


class KeptRows:
    """Rows of tensors, shared by all processes of a host that open the same rows.

    Rows on disk stay for later runs. Rows in memory stay while a process lives that has them, and
    can be opened while the first process lives. Several threads and processes may call at once:
    each process or thread finds rows that any process has written.

    Attributes:
        name: name of the files. It depends only on the key and the form of rows.
        where: "memory" or "disk".
        free: bytes that were free in memory or on disk when the rows were opened, within the
            budget.
        reason: why rows are stored in memory or on disk, for the user.
        say: prints a line for the user, such as that a row is damaged.
        say_full: prints the line that no more rows are stored; None means `say`.
        is_full: whether the store accepts no more rows.
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
        self._later = DeferredWriter()
        self._on_device: DeviceRows | None = None
        self._parts_there = 0  # number of first tensors of each row that are on the device, too
        self._take_over(self._log.kept())
        self._most = len(self._log) + opened.free // self._log.stride

    @property
    def kept(self) -> int:
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        return self.kept * self._log.stride

    def lie_on(
        self, device: torch.device, parts: int, expected: int, share: float = DEVICE_SHARE
    ) -> None:
        """Also store rows on a device, while its memory has room, to read batches from there."""
        if self._on_device is None:
            self._on_device = DeviceRows(self._log.parts[:parts], device, expected, share)
            self._parts_there = parts

    def _take_over(self, places: Numbers) -> None:
        raise NotImplementedError

    def _read(self, places: Numbers, buffers: Buffers | None) -> list[torch.Tensor]:
        if self._on_device is None:
            return self._log.read(places, buffers)
        rows, rest = self._on_device.take(places), slice(self._parts_there, None)
        if rows is not None:
            return [*rows, *self._log.read(places, buffers, rest)]
        read = self._log.read(places, buffers)
        self._on_device.put(places, read[: self._parts_there])
        rows = self._on_device.take(places)
        return read if rows is None else [*rows, *read[rest]]

    def _keep(
        self,
        names: Names,
        values: Sequence[torch.Tensor],
        at: Numbers,
        places_now: Callable[[], Numbers],
        keys: Sequence[Hashable],
    ) -> None:
        """Store rows while there is room; rows that are stored already do not change.

        A thread writes rows that come from a device.
        """
        if self.is_full or not len(names):
            return
        if all(value.device.type == "cpu" for value in values):
            self._write(names, values, at, places_now)
            return
        chosen, every = [_rows_of(value, at) for value in values], np.arange(len(at))
        there = [] if self._on_device is None else chosen[: self._parts_there]
        # The model may next change these tensors in place.
        there = [value.clone() for value in there]
        self._later.write(
            keys, chosen, lambda copies: self._write(names, copies, every, places_now, there)
        )

    def _write(
        self,
        names: Names,
        values: Sequence[torch.Tensor],
        at: Numbers,
        places_now: Callable[[], Numbers],
        there: Sequence[torch.Tensor] = (),
    ) -> None:
        """Write the rows of `_keep`, and also put the tensors of `there` on the device."""
        try:
            with self._log.alone():
                self._take_over(self._log.refresh())
                new = np.flatnonzero(places_now() < 0)
                new = new[: self._room_for(len(new))]
                if not len(new):
                    return
                chosen = [_rows_of(value, at[new]) for value in values]
                places = self._log.append(names[new], chosen)
                if self._on_device is not None and there:
                    self._on_device.put(places, [_rows_of(value, at[new]) for value in there])
                self._take_over(places)
        except OSError as error:
            self._stop(f"nothing more can be kept: {error.strerror or error}")

    def _room_for(self, count: int) -> int:
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
        one, several = "differs from its checksum and is", "differ from their checksums and are"
        differ = one if count == 1 else several
        self.say(f"features: {counted(count, 'row')}{place} {differ} computed again{which}")

    def leave_device(self) -> None:
        """Free the memory of rows on the device, until rows are read again."""
        if self._on_device is not None:
            self._on_device.release()

    def wait(self) -> None:
        self._later.wait()

    def flush(self) -> None:
        """Flush rows to disk, so that they survive a power failure, and not only a kill."""
        self.wait()
        if self.where == "disk":
            self._log.flush()

    def close(self) -> None:
        self.wait()
        self._log.close()


def opened(
    key: str,
    row: Sequence[RowPart],
    where: Where = "auto",
    budget: int | None = None,
    expected: int | None = None,
) -> Opened:
    stride = RowLog.stride_of(row)
    form = repr([VERSION, key, *map(tuple, row)])
    name = hashlib.sha256(form.encode()).hexdigest()[:16]
    room = {"memory": memory_room(), "disk": disk_room()}
    if budget is not None:
        room = {kind: min(budget, free) for kind, free in room.items()}
    size = (expected or 0) * stride
    files, reason = _files(name, _chosen_of(where, size, room, name))
    kind = "disk" if files.on_disk else "memory"
    result = f"{size_words(room[kind])} free {'on disk' if files.on_disk else 'in memory'}{reason}"
    if expected is not None:
        result = f"{counted(expected, 'row')} take {size_words(size)}, {result}"
    return Opened(RowLog(row, files, expected or 0), name, room[kind], result)


def _chosen_of(where: Where, size: int, room: dict[str, int], name: str) -> str:
    if where != "auto":
        return where
    if has_rows(name) or size <= room["disk"]:
        return "disk"
    return "memory" if size <= room["memory"] else max(room, key=lambda kind: room[kind])


def _files(name: str, where: str) -> tuple[Files, str]:
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
    index = torch.from_numpy(at).to(value.device, non_blocking=True)
    return value.detach().index_select(0, index)
