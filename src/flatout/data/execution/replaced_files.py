"""Files that are replaced while features of their samples are taken from a store."""

from __future__ import annotations

from threading import Lock

import numpy as np

from flatout.data.block import Numbers
from flatout.data.execution.row_names import NamedSlots
from flatout.data.features.store import FeatureStore


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
        found = [number for number, stamp in pairs if stamp != known[number]]
        if not found:
            return
        with self._lock:
            new = [number for number in found if number not in self._left]
            self._left.update(new)
        if new:
            first = np.array(new, np.int64) * self._variants
            self._store.leave((first[:, None] + np.arange(self._variants)).reshape(-1))
            file = known[new[0]].partition("\n")[0]
            more = f" and {len(new) - 1:,} more" if len(new) > 1 else ""
            self._store.say(f"features: replaced, and computed each time in this run: {file}{more}")
