"""Files of rows in sequence, read by row index through an index of the rows' starts.

The index is built once and kept in the cache folder, by content: a file that changed has another
index. The files' bytes are held in memory if they take at most a quarter of the free memory.
Otherwise rows are read from the files when needed, neighboring rows together.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from flatout.atomic_file import atomic_write
from flatout.cache_folder import cache_folder, is_made, kind_folder, private
from flatout.console import say_as_is
from flatout.data.reading.block import Block, Numbers, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.decoder import Bytes, Decoder, Encoded
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import File, files_words
from flatout.data.reading.origins import Gather, Rows, alone
from flatout.data.reading.schema import Schema
from flatout.data.reading.threads import Pool
from flatout.errors import DataError, as_data_error
from flatout.kernels import lines
from flatout.measure import available_bytes, usable_cpus
from flatout.words import size_words

# Version of the stored format of an index.
_VERSION = 1
# Bytes at the start and at the end of a file that its digest covers.
_ENDS = 1 << 16
# Rows that one task surveys.
_SURVEYED = 1 << 15
# Fraction of the free memory that the files' bytes may use.
_HELD = 0.25


class Index(NamedTuple):
    """Positions of the rows of some files, as if the files were concatenated.

    Attributes:
        starts: first byte of each row, int64 of shape (rows,).
        sizes: size of each row in bytes, int64 of shape (rows,).
        lengths: lengths of the ragged columns' rows, int64 of shape (rows,) each.
        facts: facts from the survey; over all files the lowest or the highest, as in `_merged`.
        notes: lines about skipped rows.
    """

    starts: Numbers
    sizes: Numbers
    lengths: dict[str, Numbers]
    facts: dict[str, float]
    notes: list[str]


class Reading(NamedTuple):
    """The limits for reading files.

    Attributes:
        piece: number of bytes that are read at a time.
        longest_row: maximum number of bytes of a row. A row that does not end within them is
            damaged.
        quiet_s: seconds between two lines of progress, and between two checks for changed files.
    """

    piece: int = 64 << 20
    longest_row: int = 1 << 28
    quiet_s: float = 1.0


class IndexedRows(Rows):
    """Rows of indexed files. Follows `flatout.data.reading.origins.Rows`."""

    random = True

    def __init__(
        self,
        files: Sequence[File],
        decoder: Decoder,
        policy: ErrorPolicy,
        kind: str,
        *,
        budget: int | None = None,
        reading: Reading | None = None,
    ) -> None:
        self.files = list(files)
        self.decoder = decoder
        self.schema: Schema = decoder.schema
        self._kind = kind
        self._bytes = _FileBytes(self.files, budget, reading)
        self._policy = ErrorPolicy()  # an index holds only good rows
        look = decoder.needs_survey or policy.skip
        self.index = index_of(self._bytes, decoder, policy, look)
        self.rows = len(self.index.starts)
        if self.rows == 0:
            raise DataError("the files hold no rows", where=names_of(self.files))

    @cached_property
    def digest(self) -> str:
        return files_digest(self.files, self.schema.dumps())

    @property
    def file_rows(self) -> Numbers:
        """First row of each file, and the number of rows last; int64 of shape (files + 1,)."""
        return np.searchsorted(self.index.starts, self._bytes.bases).astype(np.int64)

    def read_by(self, decoder: Decoder, policy: ErrorPolicy) -> IndexedRows:
        """Return the same files with another decoder, which finds the same rows in them."""
        other = copy(self)
        other.__dict__.pop("digest", None)  # the digest was of the earlier schema
        other.decoder, other.schema = decoder, decoder.schema
        if decoder.needs_survey or policy.skip:
            other.index = index_of(self._bytes, decoder, policy, True)
            other.rows = len(other.index.starts)
            if other.rows == 0:
                raise DataError("the files hold no rows", where=names_of(self.files))
        return other

    def encoded(self, numbers: Numbers, buffers: Buffers) -> Encoded:
        # No number is out of range, so nothing is clipped: this is numpy's fastest mode.
        starts = self.index.starts.take(numbers, mode="clip")
        sizes = self.index.sizes.take(numbers, mode="clip")
        margins = getattr(self.decoder, "margins", (0, 0))
        buffer, places = self._bytes.read(starts, sizes, margins, buffers)

        def where(row: int, byte: int) -> str:
            return self._where(int(starts[row]) + byte - int(places[row]))

        return Encoded(buffer, places, places + sizes, numbers, where)

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        lengths = {
            name: value.take(numbers, mode="clip") for name, value in self.index.lengths.items()
        }
        encoded = self.encoded(numbers, buffers)
        return self.decoder.decode(encoded, lengths or None, buffers, self._policy)

    def lengths(self) -> Numbers | None:
        result = list(self.index.lengths.values())
        return np.maximum.reduce(result) if result else None

    def where(self, number: int) -> str:
        return self._where(int(self.index.starts[number]))

    def _where(self, position: int) -> str:
        return self._bytes.where(position, text=getattr(self.decoder, "text", True))

    def skipped(self, gather: Gather = alone) -> list[str]:
        changes = getattr(self.decoder, "changes", None)
        return [] if changes is None else list(changes.new_notes(gather))

    def describe(self) -> str:
        return files_words(self.files, self._kind, self.rows)

    def notes(self) -> list[str]:
        return [*self.index.notes, *getattr(self.decoder, "notes", ()), *self._bytes.notes()]


class _FileBytes:
    """The bytes of several files, as if the files were concatenated."""

    def __init__(
        self, files: Sequence[File], budget: int | None, reading: Reading | None = None
    ) -> None:
        self.files, self.reading = list(files), reading or Reading()
        self.bases = offsets_of([file.size for file in files])
        self.size = int(self.bases[-1])
        room = int(available_bytes() * _HELD) if budget is None else budget
        self.holds = self.size <= room
        self._held: Bytes | None = None
        self._numbers: dict[int, int] = {}
        self._checked = 0.0
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        # Another process opens and reads the files itself.
        return {**self.__dict__, "_held": None, "_numbers": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Lock()

    def held(self) -> Bytes:
        with self._lock:
            if self._held is None:
                whole, size = np.empty(self.size, np.uint8), self.reading.piece
                pieces = [
                    (file, whole[base : base + file.size], start)
                    for file, base in zip(self.files, self.bases, strict=False)
                    for start in range(0, max(1, file.size), size)
                ]
                with Pool(usable_cpus()) as pool:
                    list(pool.map(lambda one: _read_piece(one[0], one[1], one[2], size), pieces))
                for file in self.files:
                    file.check_unchanged()
                self._held = whole
            return self._held

    def read(
        self, starts: Numbers, sizes: Numbers, margins: tuple[int, int], buffers: Buffers
    ) -> tuple[Bytes, Numbers]:
        if self.holds:
            held = self._held
            return (self.held() if held is None else held), starts
        starts, sizes = starts - margins[0], sizes + sum(margins)
        places = offsets_of(sizes)
        out = buffers.empty(int(places[-1]), np.uint8)
        owner = np.searchsorted(self.bases, starts, side="right") - 1
        self._check_now_and_then()
        for at in np.unique(owner):
            own = np.flatnonzero(owner == at)
            first = starts[own] - self.bases[at]
            try:
                lines.read_rows(
                    self._open(int(at)), first, first + sizes[own], out, places[:-1][own]
                )
            except (EOFError, OSError) as error:
                self.files[at].check_unchanged()
                raise DataError(f"cannot be read: {error}", where=self.files[at].name) from error
            self._check_what_was_read(int(at))
        return out, places[:-1] + margins[0]

    def _check_what_was_read(self, at: int) -> None:
        file, now = self.files[at], os.fstat(self._numbers[at])
        if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
            file.check_unchanged()

    def _open(self, at: int) -> int:
        with self._lock:
            if at not in self._numbers:
                with as_data_error("cannot be opened", self.files[at].name):
                    self._numbers[at] = _open_one_more(self.files[at].path)
            return self._numbers[at]

    def _check_now_and_then(self) -> None:
        if time.monotonic() - self._checked > self.reading.quiet_s:
            self._checked = time.monotonic()
            for file in self.files:
                file.check_unchanged()

    def pieces(self, at: int, decoder: Decoder) -> Iterator[tuple[Any, Bytes, int]]:
        file, split = self.files[at], decoder.split
        if self.holds:
            base = int(self.bases[at])
            buffer = self.held()[base : base + file.size]
            yield self._checked_split(split, buffer, True, file, 0), buffer, 0
            return
        place, rest = 0, np.empty(0, np.uint8)
        with open(file.path, "rb") as opened:
            while True:
                new = np.empty(self.reading.piece, np.uint8)
                count = opened.readinto(new)  # type: ignore[arg-type]
                buffer = np.concatenate([rest, new[:count]])
                final = place + len(buffer) >= file.size or count == 0
                result = self._checked_split(split, buffer, final, file, place)
                yield result, buffer, place
                if final:
                    break
                if result.consumed:
                    split = getattr(decoder, "split_rest", split)
                place += result.consumed
                rest = buffer[result.consumed :]
                if len(rest) > self.reading.longest_row:
                    raise DataError(
                        f"no row ends within {self.reading.longest_row:,} bytes",
                        where=f"{file.name}: byte {place:,}",
                    )
        file.check_unchanged()

    def _checked_split(
        self,
        split: Callable[[Bytes, bool], Any],
        buffer: Bytes,
        final: bool,
        file: File,
        place: int,
    ) -> Any:
        result = split(buffer, final)
        if result.problem:
            raise DataError(result.problem, where=f"{file.name}: byte {place + result.consumed:,}")
        return result

    def where(self, position: int, *, text: bool) -> str:
        at = int(np.searchsorted(self.bases, position, side="right")) - 1
        at = min(at, len(self.files) - 1)
        file, offset = self.files[at], position - int(self.bases[at])
        if not text:
            return f"{file.name}: byte {offset:,}"
        before, size = 0, self.reading.piece
        with suppress(OSError), open(file.path, "rb") as opened:
            for start in range(0, offset, size):
                piece = opened.read(min(size, offset - start))
                before += piece.count(b"\n")
        return f"{file.name}:{before + 1} (byte {offset:,})"

    def notes(self) -> list[str]:
        if self.holds:
            return []
        return [
            f"{size_words(self.size)} of files stay on the disk, for memory has "
            f"{size_words(available_bytes())} free: rows are read as they are wanted"
        ]


def _open_one_more(path: str) -> int:
    """Open a file; if too many files are open, raise the limit to the system's maximum."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _read_piece(file: File, whole: Bytes, start: int, size: int) -> None:
    with as_data_error("cannot be read", file.name), open(file.path, "rb", buffering=0) as opened:
        opened.seek(start)
        view = memoryview(whole.data)[start : start + size]
        while view:
            count = opened.readinto(view)
            if not count:
                break
            view = view[count:]


def index_of(
    file: _FileBytes,
    decoder: Decoder,
    policy: ErrorPolicy,
    look: bool,
) -> Index:
    """Return the index of files, from the cache or built now."""
    words = [
        f"{_VERSION} {look} {policy.skip} {policy.max_errors}",
        decoder.schema.dumps(),
        *(f"{file.path} {file.mtime_ns} {content_words(file)}" for file in file.files),
    ]
    digest = hashlib.sha256("\n".join(words).encode()).hexdigest()[:24]
    path = cache_folder() / "index" / f"{digest}.npz"
    # An index that cannot be loaded is built again.
    with suppress(Exception):
        if not is_made(path.parent):
            raise FileNotFoundError(path)
        loaded = _load(path)
        ends = loaded.starts + loaded.sizes
        if not len(ends) or (loaded.starts.min() >= 0 and ends.max() <= file.size):
            return loaded
    index = _build(file, decoder, policy, look)
    _save(index, path)
    return index


def survey_files(
    files: Sequence[File],
    decoder: Decoder,
    policy: ErrorPolicy,
) -> Index:
    """Return the index and the facts of all rows, from which a schema is inferred."""
    return index_of(_FileBytes(files, None), decoder, policy, True)


def _build(held: _FileBytes, decoder: Decoder, policy: ErrorPolicy, look: bool) -> Index:
    reported = time.monotonic()
    parts: list[Index] = []
    with Pool(usable_cpus()) as pool:
        for at, file in enumerate(held.files):
            base = int(held.bases[at])
            for piece, buffer, place in held.pieces(at, decoder):
                part = _part(held, decoder, policy, look, piece, buffer, base + place, pool)
                parts.append(part)
                if time.monotonic() - reported > held.reading.quiet_s:
                    reported = time.monotonic()
                    done = (base + place + piece.consumed) / max(1, held.size)
                    say_as_is(f"indexing {file.name}: {done:.0%} of {size_words(held.size)}")
    filled = [part for part in parts if len(part.starts)]
    names = filled[0].lengths if filled else {}
    return Index(
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        {name: np.concatenate([part.lengths[name] for part in filled]) for name in names},
        _merged([part.facts for part in filled]),
        policy.notes(),
    )


def _part(
    file: _FileBytes,
    decoder: Decoder,
    policy: ErrorPolicy,
    look: bool,
    found: Any,
    buffer: Bytes,
    base: int,
    pool: Pool,
) -> Index:
    starts, sizes = found.starts + base, found.ends - found.starts
    if not look or not len(starts):
        return Index(starts, sizes, {}, {}, [])
    text = getattr(decoder, "text", True)

    def where(row: int, byte: int) -> str:
        return file.where(base + byte, text=text)

    def survey(first: int) -> Any:
        own = slice(first, first + _SURVEYED)
        starts, ends = found.starts[own], found.ends[own]
        numbers = np.arange(len(starts), dtype=np.int64)
        return decoder.survey(Encoded(buffer, starts, ends, numbers, where), policy)

    surveys = list(pool.map(survey, range(0, len(starts), _SURVEYED)))
    good = np.concatenate([survey.good for survey in surveys])
    lengths = {
        name: np.concatenate([survey.lengths[name] for survey in surveys])[good]
        for name in surveys[0].lengths
    }
    facts = _merged([survey.facts for survey in surveys])
    return Index(starts[good], sizes[good], lengths, facts, [])


def _merged(all_facts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    lowest = ("lowest", "shortest", "whole_labels")
    return {
        name: (min if name in lowest else max)(facts[name] for facts in all_facts)
        for name in (all_facts[0] if all_facts else ())
    }


def files_digest(files: Iterable[File], *words: str) -> str:
    whole = "\n".join([*map(content_words, files), *words])
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def content_words(file: File) -> str:
    """Return a file's size and a digest of its first and last 64 KiB."""
    with as_data_error("cannot be read", file.name), open(file.path, "rb") as opened:
        digest = hashlib.sha256(opened.read(_ENDS))
        opened.seek(max(0, file.size - _ENDS))
        digest.update(opened.read(_ENDS))
    return f"{file.size} {digest.hexdigest()}"


def _load(path: Path) -> Index:
    with np.load(path, allow_pickle=False) as stored:
        rest = json.loads(str(stored["rest"]))
        lengths = {name: stored[f"length {name}"] for name in rest["lengths"]}
        # Columns of equal lengths share one array.
        for name, same in rest["same"].items():
            lengths[name] = lengths[same]
        return Index(stored["starts"], stored["sizes"], lengths, rest["facts"], rest["notes"])


def _save(index: Index, path: Path) -> None:
    same: dict[str, str] = {}
    own: dict[str, Numbers] = {}
    for name, lengths in index.lengths.items():
        equal = next((other for other in own if np.array_equal(own[other], lengths)), None)
        if equal is None:
            own[name] = lengths
        else:
            same[name] = equal
    rest = {"lengths": list(own), "same": same, "facts": index.facts, "notes": index.notes}
    # If the cache cannot be written, the index is built again at the next start.
    with suppress(OSError):
        kind_folder("index")
        with atomic_write(path, "wb", opener=private) as file:
            arrays: dict[str, Any] = {f"length {name}": value for name, value in own.items()}
            arrays.update(starts=index.starts, sizes=index.sizes, rest=json.dumps(rest))
            np.savez(file, **arrays)


def names_of(files: Sequence[File]) -> str:
    more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
    return ", ".join(file.name for file in files[:3]) + more
