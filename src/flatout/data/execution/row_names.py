"""Names of samples of image folders by their contents, independent of other samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.data.digests.digests import NoDigest, digest_of, function_name
from flatout.data.execution.augmented import Augmented
from flatout.data.execution.cache import Cached
from flatout.data.execution.samples import Decoded, Mapped, Samples
from flatout.data.features.row_log import Names
from flatout.data.reading.block import Numbers


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
