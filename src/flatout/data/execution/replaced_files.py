"""Files that are replaced while features of their samples are taken from a store."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from time import monotonic

import numpy as np

from flatout.data.block import Numbers
from flatout.data.execution.augmented import Augmented
from flatout.data.execution.row_names import NamedSlots
from flatout.data.execution.samples import Decoded, Joined, Mapped, Samples
from flatout.data.features.store import FeatureStore
from flatout.data.files import File, stamp_of
from flatout.errors import DataError

# Of files that were replaced, so many are named.
_NAMED = 3


class ReplacedFiles:
    """Looks at the files of samples whose rows are asked for.

    What takes the place of a file is read as it comes, in this run; the next one keeps it by its
    own name. Several threads may call at once.

    Args:
        named: the samples.
        variants: that each of them has.
        store: has their rows.
    """

    def __init__(self, named: NamedSlots, variants: int, store: FeatureStore) -> None:
        self._named, self._variants, self._store = named, variants, store
        self._left: set[int] = set()
        self._lock = Lock()

    def look(self, numbers: Numbers) -> None:
        """Let the store leave those of these samples whose files were replaced or have gone."""
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
    """Looks from time to time at files that hold many rows each.

    Who reads from such a file learns by an error that it is another one. Where features of all its
    rows are kept no one reads from it any more, and learns it here.

    Args:
        files: as they were opened.
        every_s: seconds between two looks, because there may be thousands of files.
    """

    def __init__(self, files: Iterable[File], every_s: float = 1.0) -> None:
        self._stamps = {file.name: (file.path, stamp_of(file.path)) for file in files}
        self._every_s, self._due = every_s, 0.0

    def look(self, numbers: Numbers) -> None:
        """Look at all files, where that is due, whichever rows are asked for.

        Raises:
            DataError: a file was written, replaced or has gone.
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
    """Files of many rows that samples are read from in each epoch; none where a cache has them."""
    while isinstance(samples, (Augmented, Mapped)):
        samples = samples.inner
    if isinstance(samples, Joined):
        return [file for part in samples.parts for file in files_of(part)]
    return list(getattr(samples.source, "files", ())) if isinstance(samples, Decoded) else []
