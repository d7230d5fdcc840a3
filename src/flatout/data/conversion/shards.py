"""Shards of a converted data set. A manifest lists whole shards, so a conversion can resume.

    train-00000-of-00012.tfrecord   a shard
    _train.tfrecord.json            the manifest: settings of the conversion, and the whole shards,
                                    with rows, bytes and CRC32C
    _train.tfrecord.toml            the schema that reads the shards

An unfinished shard has a hidden name (`.train-00003-of-00012.tfrecord.part`). Readers of the folder
skip it, and also names that begin with an underscore.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeAlias

from flatout.atomic_file import atomic_write
from flatout.data.conversion.job import Piece
from flatout.data.reading.block import Block
from flatout.data.reading.schema import Schema
from flatout.errors import DataError
from flatout.kernels import crc32c
from flatout.words import size_words

# Version of the manifest's format.
VERSION = 1
# Bytes of a shard that are read at once to compute its checksum.
_PIECE = 16 << 20
# Errors that a damaged or forged manifest may cause.
_UNREADABLE = (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError)


class Sink(Protocol):
    """An unfinished shard."""

    def write(self, encoded: Any) -> Any:
        """Append rows that the writer has encoded."""
        ...

    def close(self) -> None:
        """Write the end of the shard."""
        ...


class Writer(Protocol):
    """A format of shards.

    Attributes:
        piece_bytes: decoded bytes to encode at once.
        schema: schema that reads the shards.
    """

    piece_bytes: int
    schema: Schema

    def encode(self, block: Block) -> Any:
        """Encode rows for a sink. Several threads may call at once."""
        ...

    def open(self, out: CountedFile) -> Sink: ...


class Shard(NamedTuple):
    """A whole shard.

    Attributes:
        file: name of the file.
        rows: number of rows.
        bytes: size of the file.
        crc32c: checksum of all its bytes, as 8 hex digits.
    """

    file: str
    rows: int
    bytes: int
    crc32c: str


class Encoded(NamedTuple):
    rows: int
    data: Any


# Reports progress: the number of rows made so far, and a line about the shards that are done.
Tell: TypeAlias = Callable[[int, str], None]


class CountedFile:
    """A file that counts the bytes written to it, also by pyarrow."""

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self.bytes = 0
        self.crc = 0
        self.closed = False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._file is not None:
            self._file.write(data)
            self.crc = crc32c(data, self.crc)
        self.bytes += size
        return size

    def give_up(self) -> None:
        """Only count from now on, since bytes that a sink writes at its close must be dropped."""
        self._file = None

    def flush(self) -> None:
        """Do nothing: the whole file is flushed at its end."""

    def close(self) -> None:
        self.closed = True


@dataclass
class ShardFiles:
    """Paths and names of shards.

    Attributes:
        folder: folder of the shards.
        stem: start of their names.
        suffix: end of their names.
        count: number of shards; None if it is not known yet.
    """

    folder: Path
    stem: str
    suffix: str
    count: int | None

    def shard(self, number: int) -> str:
        of = "" if self.count is None else f"-of-{self.count:05}"
        return f"{self.stem}-{number:05}{of}{self.suffix}"

    @property
    def pattern(self) -> str:
        return str(self.folder / f"{self.stem}-*{self.suffix}")

    @property
    def manifest(self) -> Path:
        return self.folder / f"_{self.stem}{self.suffix}.json"

    @property
    def schema(self) -> Path:
        return self.folder / f"_{self.stem}{self.suffix}.toml"

    def done(self, manifest: Manifest) -> str:
        of = "" if self.count is None else f" of {self.count}"
        return f"{len(manifest.shards)}{of} shards are done and stay"

    def present(self) -> list[Path]:
        """Return files named like shards of this stem, for any number of shards."""
        name = re.compile(re.escape(self.stem) + r"-\d{5,}(-of-\d{5,})?" + re.escape(self.suffix))
        return sorted(item for item in self.folder.iterdir() if name.fullmatch(item.name))

    @contextmanager
    def locked(self) -> Iterator[None]:
        path = self.folder / f".{self.stem}{self.suffix}.lock"
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The earlier holder of the lock may just have deleted the file that is locked here.
                mine = os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
            except (BlockingIOError, FileNotFoundError):
                mine = False
            if not mine:
                raise DataError(
                    "another process is writing these shards",
                    where=str(self.folder / (self.stem + self.suffix)),
                    do="wait for it, or choose another target",
                )
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()


@dataclass
class Manifest:
    """Settings of a conversion, and its shards so far.

    Attributes:
        settings: settings that decide the bytes of the shards.
        schema: schema of the shards, as TOML.
        rows: number of rows of all shards; None if it is not known yet.
        complete: whether all shards are written.
        shards: whole shards, in their order.
        notes: lines about rows that were left out, such as bad rows.
    """

    settings: dict[str, Any]
    schema: str
    rows: int | None
    complete: bool = False
    shards: list[Shard] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the manifest. A kill leaves the old file or the new one, never a part."""
        words = {"version": VERSION, **asdict(self), "shards": [s._asdict() for s in self.shards]}
        write_whole(path, json.dumps(words, indent=1))

    @classmethod
    def load(cls, path: Path) -> Manifest | None:
        """Read a manifest, or return None if the file does not exist."""
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is no file")
            words = json.loads(path.read_text())
            version = words.pop("version")
            if version != VERSION:
                raise DataError(
                    f"expected a manifest of version {VERSION}, found {version}", where=str(path)
                )
            shards = [_checked_shard(Shard(**item)) for item in words.pop("shards")]
            result = cls(**words, shards=shards)
            if not isinstance(result.settings, dict) or not isinstance(result.schema, str):
                raise TypeError("expected settings by name, and a schema as text")
            if not all(isinstance(note, str) for note in result.notes):
                raise TypeError("expected notes as texts")
            return result
        except FileNotFoundError:
            return None
        except DataError:
            raise
        except _UNREADABLE as error:
            raise DataError(
                f"the manifest cannot be read: {error}",
                where=str(path),
                do="delete it, or pass overwrite",
            ) from error


def _checked_shard(shard: Shard) -> Shard:
    counts = (shard.rows, shard.bytes)
    if not isinstance(shard.file, str) or os.path.basename(shard.file) != shard.file:
        raise ValueError(f"expected names of files beside it, found {shard.file!r:.200}")
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"expected rows and bytes of {shard.file}, found {counts!r:.200}")
    if not isinstance(shard.crc32c, str):
        raise TypeError(f"expected the checksum of {shard.file}, found {shard.crc32c!r:.80}")
    return shard


def begin(place: ShardFiles, wanted: Manifest, overwrite: bool) -> Manifest:
    """Return the manifest to continue with: the one in the folder, or a new one.

    Shards that differ from the manifest are removed from it, so they are written again.
    """
    for part in place.folder.glob(f".{place.stem}-*{place.suffix}.part"):
        part.unlink()
    try:
        result = Manifest.load(place.manifest)
    except DataError:
        if not overwrite:
            raise
        result = None
    if result is not None and result.settings == wanted.settings:
        result.shards = [shard for shard in result.shards if _is_whole(place.folder, shard)]
        result.complete = result.complete and len(result.shards) == place.count
        write_whole(place.schema, wanted.schema)
        return result
    present = place.present()
    if not overwrite and (result is not None or present):
        raise _refusal(place, result, wanted, present)
    # The shards first: a manifest that names missing shards does no harm.
    for path in present:
        path.unlink()
    wanted.save(place.manifest)
    write_whole(place.schema, wanted.schema)
    return wanted


def _refusal(
    place: ShardFiles, manifest: Manifest | None, wanted: Manifest, present: Sequence[Path]
) -> DataError:
    if manifest is None:
        what = f"{present[0].name} is there already, and no manifest tells how it was made"
    else:
        state = "is here already" if manifest.complete else "was begun here"
        what = f"another conversion {state}: {differences(manifest.settings, wanted.settings)}"
    return DataError(
        what,
        where=str(place.folder),
        do="choose another target, convert with the same settings, or pass overwrite (--overwrite)",
    )


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if len(names) > 1 and "order" in names:
        # `order` follows from the other settings, and its text is not for the user
        names.remove("order")
    if "source" in names:  # the other differences follow from this one, or matter little
        return "its source was another, or has changed since"
    words = [f"{name} was {before.get(name)}, now {now.get(name)}" for name in names]
    return ", ".join(words)


def _is_whole(folder: Path, shard: Shard) -> bool:
    crc, size = 0, 0
    if not (folder / shard.file).is_file():
        return False
    try:
        with open(folder / shard.file, "rb") as file:
            if os.fstat(file.fileno()).st_size != shard.bytes:
                return False
            while piece := file.read(_PIECE):
                crc, size = crc32c(piece, crc), size + len(piece)
    except OSError:
        return False
    return size == shard.bytes and f"{crc:08x}" == shard.crc32c


@contextmanager
def open_shard(place: ShardFiles, name: str) -> Iterator[CountedFile]:
    """Open a shard to write. It appears under its name only if the block ends without an error."""
    path = place.folder / name
    with atomic_write(path, "wb", durable=True, draft=f".{name}.part") as file:
        out = CountedFile(file)
        try:
            yield out
        except BaseException:
            out.give_up()
            raise


def write_shards(
    place: ShardFiles,
    writer: Writer,
    manifest: Manifest,
    pieces: Sequence[Piece],
    encoded: Callable[[Sequence[Piece]], Iterator[Encoded]],
    tell: Tell,
    notes: Callable[[], list[str]],
) -> None:
    done = {shard.file: shard for shard in manifest.shards}
    missing = [piece for piece in pieces if place.shard(piece.part) not in done]
    written = sum(shard.rows for shard in manifest.shards)
    tell(written, f"{len(done)} of {place.count} shards done")
    made = encoded(missing)
    for number, own in groupby(missing, key=lambda piece: piece.part):
        name, rows = place.shard(number), 0
        with open_shard(place, name) as out:
            sink = writer.open(out)
            for _, part in zip(own, made, strict=False):
                sink.write(part.data)
                rows += part.rows
                tell(written + rows, f"{len(done)} of {place.count} shards done")
            sink.close()
        done[name] = Shard(name, rows, out.bytes, f"{out.crc:08x}")
        written += rows
        manifest.shards = sorted(done.values())
        manifest.save(place.manifest)
        tell(written, f"{len(done)} of {place.count} shards done")
    manifest.complete, manifest.notes = True, notes()
    manifest.save(place.manifest)


def write_whole(path: Path, text: str) -> None:
    """Write a small file. A kill leaves the old file or the new one, never a part."""
    with atomic_write(path, durable=True, draft=f".{path.name}.part") as file:
        file.write(text)


@contextmanager
def disk(folder: Path, done: Callable[[], str]) -> Iterator[None]:
    """Turn a failure to write into a DataError; `done` returns a line about the shards written."""
    try:
        yield
    except OSError as error:
        what, do = f"cannot be written: {error.strerror or error}", "choose another folder"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder).free if folder.exists() else 0
            what = f"the disk is full: {size_words(free)} are free"
            do = "make room, or choose another folder"
        raise DataError(
            f"{what}; {done()}",
            where=str(folder),
            do=f"{do}; the same command goes on where this one ended",
        ) from error
