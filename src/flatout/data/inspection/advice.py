"""What would make an input faster or safer, with the numbers that say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flatout.words import count_words, counted, duration, size_words

# Below this share of what is free, files and decoded rows are held without a second thought.
_ROOM = 0.5
_SMALL_FILE = 1 << 20
_MANY_FILES = 16
_LARGE_FILE = 1 << 30
# How much faster a row cache has to be to be worth its place on the disk.
_WORTH = 1.5
# What an epoch may cost without anyone minding.
_QUICK_S = 0.1


class Advice(NamedTuple):
    """One thing to know.

    Attributes:
        topic: what it is about: "files or pipe", "merge", "split", "convert", "order" or "memory".
        do: whether there is something to do.
        words: what, and why.
    """

    topic: str
    do: bool
    words: str


@dataclass(frozen=True)
class Facts:
    """What advice rests on.

    Attributes:
        format: of the files.
        source: as the user named it, for commands.
        files: how many.
        bytes: of them, as they are read.
        largest: bytes of the largest.
        rows: of all.
        opening_s: that opening a file takes, or None where that was not measured.
        parts: row groups or record batches, where rows are decoded in such; else None.
        random: whether rows in any order cost about as much as in sequence.
        sorted_by_class: whether one class comes after the other.
        decoded: bytes of all rows, decoded.
        decode_per_s: rows a second that one thread decodes.
        cache_per_s: rows a second that one thread takes from a row cache.
        memory: bytes that are free.
        disk: bytes that are free where caches are kept.
    """

    format: str
    source: str
    files: int
    bytes: int
    largest: int
    rows: int
    opening_s: float | None
    parts: int | None
    random: bool
    sorted_by_class: bool
    decoded: float
    decode_per_s: float
    cache_per_s: float
    memory: int
    disk: int


def advice(facts: Facts) -> list[Advice]:
    """All that is to be said."""
    return [
        *_files_or_pipe(facts),
        *_merge(facts),
        *_split(facts),
        *_convert(facts),
        *_order(facts),
        *_memory(facts),
    ]


def _files_or_pipe(facts: Facts) -> Iterator[Advice]:
    size, free = size_words(facts.bytes), size_words(facts.memory)
    if facts.bytes <= _ROOM * facts.memory:
        words = f"files: {size} fit in memory ({free} free) and are read once"
    else:
        words = f"files: {size} are more than memory holds ({free} free), but any row can be read"
    words += "; a pipe has no row numbers, so it shuffles within a window and resumes by reading on"
    yield Advice("files or pipe", False, words)


def _merge(facts: Facts) -> Iterator[Advice]:
    mean = facts.bytes / facts.files
    if facts.files < _MANY_FILES or mean > _SMALL_FILE or facts.format == "rows":
        return
    opening = ""
    if facts.opening_s is not None:
        opening = f", and opening one takes {facts.opening_s * 1e6:,.0f} µs here"
        opening += " (more on a network disk)"
    yield Advice(
        "merge",
        True,
        f"{facts.files:,} files of {size_words(mean)} in the mean{opening}: "
        f"flatout data convert {facts.source} all.tfrecord",
    )


def _split(facts: Facts) -> Iterator[Advice]:
    if facts.parts is not None:
        if facts.parts < _MANY_FILES and facts.bytes > _LARGE_FILE:
            yield Advice(
                "split",
                True,
                f"{facts.parts:,} row groups in {size_words(facts.bytes)}: a thread decodes a "
                f"whole one; flatout data convert {facts.source} all.parquet writes small ones",
            )
        return
    if facts.files == 1 or facts.largest > _LARGE_FILE:
        yield Advice(
            "split",
            False,
            f"not needed: threads and ranks share one file of {size_words(facts.largest)}, because "
            "its rows are found by number",
        )


def _convert(facts: Facts) -> Iterator[Advice]:
    if facts.format == "rows":
        return
    ratio = facts.cache_per_s / facts.decode_per_s
    seconds = facts.rows / facts.decode_per_s
    words = f"one thread decodes all rows in {duration(seconds)}"
    if seconds < _QUICK_S:
        yield Advice("convert", False, f"not needed: {words}")
        return
    words += (
        f" ({count_words(facts.decode_per_s)} rows/s), and takes them from a row cache in "
        f"{duration(facts.rows / facts.cache_per_s)} ({count_words(facts.cache_per_s)} rows/s)"
    )
    if ratio < _WORTH:
        yield Advice("convert", False, f"not worth it: {words}")
        return
    yield Advice(
        "convert",
        True,
        f"{words}, which takes {size_words(facts.decoded)} on the disk: "
        f"flatout data convert {facts.source} all.rows; or .cache() in the pipeline, from the "
        "second epoch on",
    )


def _order(facts: Facts) -> Iterator[Advice]:
    if facts.sorted_by_class:
        yield Advice(
            "order",
            True,
            "the rows are sorted by class: without .shuffle(seed) batches hold one class each; "
            "flatout data convert --shuffle 0 writes them shuffled, --balance spread evenly mixed",
        )
    if not facts.random:
        yield Advice(
            "order",
            False,
            "rows are decoded in chunks: a shuffle decodes all once and keeps them, in memory or "
            "on the disk",
        )


def _memory(facts: Facts) -> Iterator[Advice]:
    take = "takes" if facts.rows == 1 else "take"
    decoded = f"{counted(facts.rows, 'row')} {take} {size_words(facts.decoded)} decoded"
    if facts.decoded <= _ROOM * facts.memory:
        words = f"{decoded}: .cache() keeps them in memory ({size_words(facts.memory)} free)"
    elif facts.decoded <= facts.disk:
        words = (
            f"{decoded}: too much for memory ({size_words(facts.memory)} free), .cache() goes to "
            f"the disk ({size_words(facts.disk)} free)"
        )
    else:
        words = (
            f"{decoded}: more than memory ({size_words(facts.memory)} free) and disk "
            f"({size_words(facts.disk)} free) hold; do without a cache, or choose another disk "
            "with FLATOUT_CACHE"
        )
    yield Advice("memory", False, words)
