"""Conversion of a stream to shards. Finished shards stay, but the conversion cannot be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flatout.data.conversion.converted import SHARD_BYTES, Converted, ShardSizes
from flatout.data.conversion.progress import progress as showing
from flatout.data.conversion.shards import (
    CountedFile,
    Manifest,
    Shard,
    ShardFiles,
    Writer,
    begin,
    disk,
    open_shard,
)
from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import Block, take
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.origins import Stream, is_stream
from flatout.data.reading.schema import Schema
from flatout.errors import DataError


def write_stream(
    pipeline: Pipeline,
    place: ShardFiles,
    writer_of: Callable[[Schema], Writer],
    sizes: ShardSizes,
    overwrite: bool,
    progress: bool,
    began: float,
) -> Converted:
    stream = pipeline.origin
    assert is_stream(stream)
    if pipeline.stages:
        raise DataError(
            "a stream is converted as it comes, without stages",
            do="convert it first, and write the stages after the files",
        )
    if sizes.shards is not None:
        raise DataError(
            "the number of rows of a stream is not known, so they cannot be shared out",
            do="pass rows_per_shard or shard_bytes",
        )
    blocks = _blocks(stream)
    settings = {"source": "a stream", "to": place.suffix}
    with place.locked():
        if not overwrite and (place.manifest.exists() or place.present()):
            raise DataError(
                "shards of this name are there already, and a stream cannot be gone on with",
                where=str(place.folder),
                do="choose another target, or pass overwrite (--overwrite)",
            )
        first = next(blocks, None)
        if first is None:
            raise DataError("the stream ended without a row", where=stream.describe())
        writer = writer_of(_schema(stream.schema, first))
        manifest = Manifest(settings, writer.schema.dumps(), None)
        place.manifest.unlink(missing_ok=True)
        manifest = begin(place, manifest, overwrite)
        with (
            disk(place.folder, lambda: place.done(manifest)),
            showing("converting", None, progress) as tell,
        ):
            _Writing(place, writer, manifest, sizes, tell).write(first, blocks)
            manifest.complete, manifest.notes = True, stream.notes()
            manifest.save(place.manifest)
    return Converted.of_shards(place, manifest, 0, began)


def _blocks(stream: Stream) -> Iterator[Block]:
    return (block for block in stream.blocks(0, Buffers()) if len(block))


def _schema(schema: Schema, block: Block) -> Schema:
    columns = tuple(column for column in schema.columns if column.name in block.columns)
    return Schema(format=schema.format, columns=columns)


class _Writing:
    def __init__(
        self,
        place: ShardFiles,
        writer: Writer,
        manifest: Manifest,
        sizes: ShardSizes,
        tell: Callable[[int, str], None],
    ) -> None:
        self._place, self._writer, self._manifest, self._tell = place, writer, manifest, tell
        self._most_rows = sizes.rows
        self._most_bytes = sizes.bytes or SHARD_BYTES
        self._rows = 0

    def write(self, first: Block, blocks: Iterator[Block]) -> None:
        rest: Block | None = first
        while rest is not None:
            name = self._place.shard(len(self._manifest.shards))
            with open_shard(self._place, name) as out:
                rows, rest = self._shard(out, rest, blocks)
            shard = Shard(name, rows, out.bytes, f"{out.crc:08x}")
            self._manifest.shards.append(shard)
            self._manifest.save(self._place.manifest)

    def _shard(
        self, out: CountedFile, block: Block, blocks: Iterator[Block]
    ) -> tuple[int, Block | None]:
        """Fill one shard; return its number of rows, and the rows for the next shard."""
        sink, rows = self._writer.open(out), 0
        rest: Block | None = block
        while rest is not None:
            room = len(rest) if self._most_rows is None else self._most_rows - rows
            part, rest = _cut(rest, room)
            self._put(sink, part)
            rows += len(part)
            full = rows == self._most_rows or (
                self._most_rows is None and out.bytes >= self._most_bytes
            )
            if rest is None:
                rest = next(blocks, None)
            if full:
                break
        sink.close()
        return rows, rest

    def _put(self, sink: Any, block: Block) -> None:
        sink.write(self._writer.encode(block))
        self._rows += len(block)
        self._tell(self._rows, f"{len(self._manifest.shards)} shards done")


def _cut(block: Block, room: int) -> tuple[Block, Block | None]:
    if len(block) <= room:
        return block, None
    index = np.arange(len(block), dtype=np.int64)
    return take(block, index[:room]), take(block, index[room:])
