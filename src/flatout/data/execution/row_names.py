"""Names of samples by their contents, and checks for files that are replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.data.digests.digests import NoDigest, digest_of, function_name
from flatout.data.execution.augmented import Augmented
from flatout.data.execution.cache import Cached
from flatout.data.execution.samples import Decoded, Joined, Mapped, Samples
from flatout.data.features.row_log import Names
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


class NamedSlots(NamedTuple):
    """Samples that are named by their contents.

    Attributes:
        made: 16 hex digits over the way in which samples are made.
        names: names of each sample's variants, uint64 of shape (samples * variants, 2).
        stamps: text for each row that identified its data when the sample was named.
        stamps_now: returns the present texts of some rows.
        targets: targets of all samples, where names depend only on inputs; None without targets, or
            where a user's function gets targets.
    """

    made: str
    names: Names
    stamps: Sequence[str]
    stamps_now: Callable[[Numbers | None], Sequence[str]]
    targets: npt.NDArray[Any] | None


def named_slots(samples: Samples, variants: int) -> NamedSlots | None:
    """Return names of samples and their variants, or None if single samples have no names."""
    words: list[str] = []
    are_mapped = False
    while isinstance(samples, (Augmented, Cached, Mapped)):
        own = _own_words(samples)
        if own is None:
            return None
        words.append(own)
        are_mapped |= isinstance(samples, Mapped)
        samples = samples.inner
    if not isinstance(samples, Decoded):
        return None
    source, targets = samples.source, samples.targets()
    if source.row_stamps(np.empty(0, np.int64)) is None:
        return None
    # A function may make inputs from targets, and targets from inputs.
    result = targets if are_mapped else None

    def now(numbers: Numbers | None = None) -> Sequence[str]:
        stamps = source.row_stamps(numbers) or ()
        if result is None:
            return stamps
        own = (result if numbers is None else result[numbers]).tolist()
        return [f"{stamp}\n{target}" for stamp, target in zip(stamps, own, strict=True)]

    stamps = now()
    made = digest_of(source.schema.dumps() if are_mapped else source.input_words(), *words)
    return NamedSlots(
        made, _names_of(stamps, variants), stamps, now, None if are_mapped else targets
    )


def _own_words(samples: Augmented | Cached | Mapped) -> str | None:
    if isinstance(samples, Cached):
        return ""
    if isinstance(samples, Augmented):
        return None if samples.draws_by_number else " ".join(samples.words)
    try:
        return None if samples.wants_rng else function_name(samples.function)
    except NoDigest:
        return None


def _names_of(stamps: Sequence[str], variants: int) -> Names:
    data = b"".join(
        blake2b(words.encode(errors="surrogateescape"), digest_size=16).digest()
        for words in _each_once(stamps)
    )
    names = np.frombuffer(data, np.uint64).reshape(-1, 2).repeat(variants, axis=0)
    names[:, 0] += np.tile(np.arange(variants, dtype=np.uint64), len(stamps))
    return names


def _each_once(stamps: Sequence[str]) -> Iterator[str]:
    result: Counter[str] = Counter()
    for stamp in stamps:
        result[stamp] += 1
        yield stamp if result[stamp] == 1 else f"{stamp} {result[stamp]}"
