"""Features by name, where it is not known before which samples there will be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flatout.data.block import Numbers
from flatout.data.buffers import Buffers
from flatout.data.features.files import remove_rows
from flatout.data.features.kept_rows import KeptRows, Opened, Where, opened
from flatout.data.features.row_log import RowPart


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
        """A store of what `key` names, with what was kept of it before.

        Where the cache folder cannot be written it is in memory, and `reason` says so.

        Args:
            key: as `feature_key` gives it.
            row: what a row holds.
            where: as `opened` takes it.
            budget: likewise.
            expected: likewise.
        """
        return cls(opened(key, row, where, budget, expected))

    @property
    def kept(self) -> int:
        """How many names have a row."""
        return len(self._at)

    def places(self, names: Sequence[bytes]) -> Numbers:
        """Where the rows of these names are, for `get`; -1 where there is none, by any process.

        A row is compared with its checksum when it is asked for first in this process; one that
        differs counts as absent from then on, and may be put again.

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
        """Rows at places that `places` gave.

        Returns:
            a tensor for each part of a row, of shape (count, ...), in this order: on the CPU, or on
            the device that rows lie on.
        """
        return self._read(places, buffers)

    def put(self, names: Sequence[bytes], values: Sequence[torch.Tensor]) -> None:
        """Keep rows while there is room; those that are there already stay as they are.

        Where the disk or memory is full, that is said once, and nothing more is kept.

        Args:
            names: of the rows.
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
        """Close it, and remove what is kept on the disk: no one will ask for it."""
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
