"""Features by name, for samples that are not known in advance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flatout.data.features.files import remove_rows
from flatout.data.features.kept_rows import KeptRows, Opened, Where, opened
from flatout.data.features.row_log import RowPart
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
            key: result of `feature_key`.
            row: the tensors of a row.
            where: "memory", "disk" or "auto".
            budget: maximum bytes of the rows; None means the limits in `room.py`.
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
