"""What a torch DataLoader's workers end of, in words for people."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from flatout.devices import read_shm
from flatout.errors import DataError
from flatout.words import memory_words

# How torch says that a worker could not hand over a batch: by SIGBUS within it, or an error.
_NO_ROOM = ("Bus error", "No space left on device", "unable to allocate shared memory")


def named_faults(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """What a loader gives.

    Raises:
        DataError: /dev/shm is too small for the batches that its workers hand over.
    """
    try:
        yield from loader
    except RuntimeError as error:
        refuse_small_shm(error)
        raise


def refuse_small_shm(error: Exception) -> None:
    """Raise what it means, if an error means that /dev/shm has no room.

    Raises:
        DataError: it does.
    """
    if not isinstance(error, RuntimeError) or not any(words in str(error) for words in _NO_ROOM):
        return
    shm = read_shm()
    size = "there is none" if shm is None else f"it has {memory_words(shm.total)}"
    raise DataError(
        f"/dev/shm, through which loader workers hand over their batches, is too small: {size}",
        do="enlarge it (docker run --shm-size=2g), or use fewer workers or smaller batches",
    ) from error
