"""Sizes of shards that a user asks for, and the result of a conversion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flatout.data.conversion.shards import Manifest, ShardFiles
from flatout.data.stores.row_folder import read_meta
from flatout.errors import DataError
from flatout.words import size_words

# Maximum number of classes that are named one by one.
_TOLD = 8

To = Literal["tfrecord", "parquet", "rows"]

SHARD_BYTES = 128 << 20
"""Bytes of a shard, if the user sets no size."""


class ShardSizes(NamedTuple):
    """A user's setting for the size of shards; at most one attribute is set.

    Attributes:
        shards: number of shards.
        rows: maximum number of rows of a shard.
        bytes: approximate bytes of a shard.
    """

    shards: int | None = None
    rows: int | None = None
    bytes: int | None = None

    def check(self, kind: str) -> None:
        names = ("shards", "rows_per_shard", "shard_bytes")
        given = {name: value for name, value in zip(names, self, strict=True) if value is not None}
        if len(given) > 1:
            raise DataError(f"expected at most one of {', '.join(names)}; found {', '.join(given)}")
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise DataError(f"{name}: expected an int of at least 1, found {value!r}")
            if kind == "rows":
                raise DataError(f"a row cache is one folder, without shards; found {name}")

    def counts(self, rows: int, row_bytes: float) -> list[int]:
        if self.shards is not None:
            count = self.shards
        elif self.rows is not None:
            count = -(-rows // self.rows)
        else:
            count = max(1, round(rows * row_bytes / (self.bytes or SHARD_BYTES)))
            count = min(count, rows)
        if count > rows:
            raise DataError(f"{count:,} shards are more than there are rows: {rows:,}")
        cuts = [rows * shard // count for shard in range(count + 1)]
        return [stop - start for start, stop in pairwise(cuts)]


@dataclass(frozen=True)
class Converted:
    """Result of a conversion. `str` returns a text for the user.

    Attributes:
        to: name of the written format.
        files: paths of the files.
        rows: number of rows in the files.
        bytes: size of all files in bytes.
        found: number of rows that an earlier, interrupted run had written.
        seconds: duration of the conversion.
        schema: the path of the schema that reads the files; None if they contain it.
        read: line of Python code that reads the files.
        notes: lines for the user.
    """

    to: str
    files: list[str]
    rows: int
    bytes: int
    found: int
    seconds: float
    schema: str | None
    read: str
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_shards(
        cls,
        place: ShardFiles,
        manifest: Manifest,
        found: int,
        began: float,
        classes: Sequence[str] | None = None,
    ) -> Converted:
        kind = place.suffix.removeprefix(".")
        read = f'flatout.data.{kind}("{place.pattern}", schema="{place.schema}")'
        if classes is not None:
            read = f'flatout.data.images("{place.pattern}", size=224{_classes_words(classes)})'
        return cls(
            to=kind,
            files=[str(place.folder / shard.file) for shard in manifest.shards],
            rows=sum(shard.rows for shard in manifest.shards),
            bytes=sum(shard.bytes for shard in manifest.shards),
            found=found,
            seconds=time.monotonic() - began,
            schema=str(place.schema),
            read=read,
            notes=manifest.notes,
        )

    @classmethod
    def of_folder(cls, path: Path, rows: int, found: int, began: float) -> Converted:
        meta = read_meta(path)
        return cls(
            to="rows",
            files=[str(path)],
            rows=rows,
            bytes=sum(file["size"] for file in meta["files"].values()),
            found=found,
            seconds=time.monotonic() - began,
            schema=None,
            read=f'flatout.data.rows("{path}")',
            notes=list(meta.get("notes", [])),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.rows and self.found == self.rows:
            first = f"{self.rows:,} rows were there already; their checksums are good"
        else:
            rate = (self.rows - self.found) / max(self.seconds, 1e-9)
            first = f"{self.rows:,} rows in {self.seconds:.1f} s, {rate:,.0f} rows/s"
            if self.found:
                first += f"; {self.found:,} of them were there already"
        files = self.files[0] if len(self.files) == 1 else f"{self.files[0]} … {self.files[-1]}"
        count = "" if len(self.files) == 1 else f"{len(self.files):,} files, "
        return "\n".join(
            [
                first,
                f"{files}  {count}{size_words(self.bytes)}",
                *self.notes,
                f"read it: {self.read}",
            ]
        )


def _classes_words(classes: Sequence[str]) -> str:
    if not classes:
        return ", labels=False"
    return f", classes={list(classes)}" if len(classes) <= _TOLD else ""
