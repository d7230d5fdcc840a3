"""Checks for files that are replaced while a store has features of their samples."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from time import monotonic

import numpy as np

from flatout.data.execution.augmented import Augmented
from flatout.data.execution.row_names import NamedSlots
from flatout.data.execution.samples import Decoded, Joined, Mapped, Samples
from flatout.data.features.store import FeatureStore
from flatout.data.reading.block import Numbers
from flatout.data.reading.files import File, stamp_of
from flatout.errors import DataError

# Maximum number of replaced files that one message names.
_NAMED = 3


class ReplacedFiles:
    """Checks the files of samples whose features are about to be used.

    In this run, features of a file's replacement are computed each time. The next run keeps them
    under the new file's name. Several threads may call at once.

    Args:
        named: samples with names that depend on their files.
        variants: number of variants of each sample.
        store: the store that has their features.
    """

    def __init__(self, named: NamedSlots, variants: int, store: FeatureStore) -> None:
        self._named, self._variants, self._store = named, variants, store
        self._left: set[int] = set()
        self._lock = Lock()

    def look(self, numbers: Numbers) -> None:
        """Remove samples from the store whose files were replaced or deleted."""
        known, now = self._named.stamps, self._named.stamps_now(numbers)
        pairs = zip(numbers.tolist(), now, strict=True)
        replaced = [number for number, stamp in pairs if stamp != known[number]]
        if not replaced:
            return
        with self._lock:
            new = [number for number in replaced if number not in self._left]
            self._left.update(new)
        if new:
            first = np.array(new, np.int64) * self._variants
            self._store.leave((first[:, None] + np.arange(self._variants)).reshape(-1))
            files = ", ".join(known[number].partition("\n")[0] for number in new[:_NAMED])
            more = f" and {len(new) - _NAMED:,} more" if len(new) > _NAMED else ""
            self._store.say(f"features: replaced or gone, none kept in this run: {files}{more}")


class WatchedFiles:
    """Checks, from time to time, files that hold many rows each.

    A reader of a replaced file gets an error. If features of all rows are stored, nothing reads the
    file, and this check raises the error.

    Args:
        files: the files as they were opened.
        every_s: seconds between two checks, because there may be thousands of files.
    """

    def __init__(self, files: Iterable[File], every_s: float = 1.0) -> None:
        self._stamps = {file.name: (file.path, stamp_of(file.path)) for file in files}
        self._every_s, self._due = every_s, 0.0

    def look(self, numbers: Numbers) -> None:
        """Check all files if a check is due, for any rows.

        Raises:
            DataError: a file was written, replaced or deleted.
        """
        now = monotonic()
        if now < self._due:
            return
        self._due = now + self._every_s
        for name, (path, stamp) in self._stamps.items():
            if stamp_of(path) != stamp:
                raise DataError(
                    "the file was replaced or written while features of its rows are used",
                    where=name,
                    do="start again once it is complete; nothing may write to it while it is read",
                )


def files_of(samples: Samples) -> list[File]:
    """Return the files with many rows from which each epoch reads samples; [] with a cache."""
    while isinstance(samples, (Augmented, Mapped)):
        samples = samples.inner
    if isinstance(samples, Joined):
        return [file for part in samples.parts for file in files_of(part)]
    return list(getattr(samples.source, "files", ())) if isinstance(samples, Decoded) else []
