"""Rows of stored features that are also on a device, so that batches are gathered there."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from weakref import WeakSet

import numpy as np
import torch

from flatout.data.features.files import device_room
from flatout.data.features.row_log import RowPart
from flatout.data.reading.block import Numbers

# _UNKNOWN: rows for which there is memory if the number of rows is not known. _MORE: fraction of
# additional rows if it is known, such as for validation samples.
_UNKNOWN, _MORE = 4096, 0.25


class DeviceRows:
    """Rows on a device, by their positions in a log, as far as the device has memory.

    Memory is allocated when the first row is put. Several threads may call at once, on streams that
    wait for the device's default stream.
    """

    def __init__(
        self, parts: Sequence[RowPart], device: torch.device, expected: int, share: float
    ) -> None:
        self._parts, self._device, self._share = parts, device, share
        self._wanted = self._most = int(expected * (1 + _MORE)) or _UNKNOWN
        self._tables: list[torch.Tensor] | None = None
        # position on the device of each row of the log; -1 for rows that are not on the device
        self._at = np.empty(0, np.int64)
        self._count = 0
        self._lock = RLock()
        _on_devices.add(self)

    def put(self, places: Numbers, values: Sequence[torch.Tensor]) -> None:
        """Copy rows to the device while there is memory."""
        with self._lock, torch.inference_mode(False):
            _, firsts = np.unique(places, return_index=True)
            new = np.sort(firsts[self._at_of(places[firsts]) < 0])
            tables = self._taken() if len(new) else []
            new = new[: self._most - self._count]
            if not len(new):
                return
            at = np.arange(self._count, self._count + len(new))
            self._count += len(new)
            whole = len(new) == len(places)
            for table, part, value in zip(tables, self._parts, values, strict=True):
                rows = value if whole else value[torch.from_numpy(new).to(value.device)]
                rows = rows.detach().to(self._device, non_blocking=True)
                rows = rows.permute(0, 2, 3, 1) if part.channels_last else rows
                table[at[0] : at[-1] + 1].copy_(rows)
            self._at[places[new]] = at

    def take(self, places: Numbers) -> list[torch.Tensor] | None:
        """Return these rows, one tensor per part, or None if a row is not on the device."""
        with self._lock, torch.inference_mode(False):
            at = self._at_of(places)
            if self._tables is None or (at < 0).any():
                return None
            index = torch.from_numpy(at).to(self._device, non_blocking=True)
            rows = [table.index_select(0, index) for table in self._tables]
        pairs = zip(rows, self._parts, strict=True)
        return [item.permute(0, 3, 1, 2) if part.channels_last else item for item, part in pairs]

    def release(self) -> int:
        """Free all rows, until other rows are put; return the freed bytes."""
        with self._lock:
            freed = sum(table.nbytes for table in self._tables or ())
            self._tables, self._most = None, self._wanted
            self._at, self._count = np.empty(0, np.int64), 0
            return freed

    def give_way(self) -> int:
        """Free all rows, and accept no more; return the freed bytes."""
        with self._lock:
            self._wanted = 0
            return self.release()

    def _at_of(self, places: Numbers) -> Numbers:
        if len(places) and (last := int(places.max())) >= len(self._at):
            grown = np.full(2 * (last + 1), -1, np.int64)
            grown[: len(self._at)] = self._at
            self._at = grown
        return self._at[places]

    def _taken(self) -> list[torch.Tensor]:
        if self._tables is None:
            stride = sum(part.width for part in self._parts)
            self._most = min(self._most, device_room(self._device, self._share) // max(1, stride))
            try:
                self._tables = [self._table(part) for part in self._parts]
            except torch.OutOfMemoryError:  # other allocations have taken the memory
                self._tables, self._most = None, 0
        return self._tables or []

    def _table(self, part: RowPart) -> torch.Tensor:
        shape = part.shape
        if part.channels_last:
            channels, *size = shape
            shape = (*size, channels)
        return torch.empty((self._most, *shape), dtype=part.dtype, device=self._device)


_on_devices: WeakSet[DeviceRows] = WeakSet()


def features_give_way() -> int:
    """Free all rows on all devices, after a device ran out of memory; return the freed bytes."""
    return sum(rows.give_way() for rows in list(_on_devices))
