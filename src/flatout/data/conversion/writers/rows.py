"""Flatout's row cache: a folder of decoded rows, which gets its name when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from flatout import unfinished
from flatout.atomic_file import flush_folder
from flatout.data.conversion.job import Piece
from flatout.data.conversion.shards import Tell, differences
from flatout.data.digests.digests import digest_of
from flatout.data.reading.block import Block
from flatout.data.reading.schema import Schema
from flatout.data.stores.row_folder import Filling, RowFolder, read_meta
from flatout.data.stores.row_store import Layout
from flatout.errors import DataError

# Decoded bytes of a piece of rows.
PIECE_BYTES = 4 << 20


def rows_schema(schema: Schema) -> Schema:
    return Schema(format="rows", columns=schema.columns, options=schema.options)


def is_there(target: Path, settings: dict[str, Any], overwrite: bool) -> bool:
    """Return whether the folder is complete, made with these settings, and undamaged."""
    if target.exists():
        result = _settings(target)
        if result == settings and _is_good(target):
            _remove_old(target)
            return True
        if not overwrite and result != settings:
            raise _refusal(target, result, settings)
        if result is None and not _was_written(target):
            raise DataError(
                "only what Flatout has written is overwritten, and this is something else",
                where=str(target),
                do="move it elsewhere, or choose another target",
            )
    return False


def _settings(target: Path) -> dict[str, Any] | None:
    try:
        settings = read_meta(target).get("settings")
    except DataError:
        return None
    return settings if isinstance(settings, dict) else None


def _was_written(target: Path) -> bool:
    if target.is_symlink() or not target.is_dir():
        return False
    names = {path.name for path in target.iterdir()}
    return not names or {"meta.json", "rows.bin"} <= names


def _is_good(target: Path) -> bool:
    try:
        RowFolder(target).verify()
    except DataError:
        return False
    return True


def _refusal(target: Path, found: dict[str, Any] | None, settings: dict[str, Any]) -> DataError:
    what = "something else is here already"
    if found is not None:
        what = f"another conversion is here already: {differences(found, settings)}"
    return DataError(
        what,
        where=str(target),
        do="choose another target, convert with the same settings, or pass overwrite (--overwrite)",
    )


def write_rows(
    target: Path,
    layout: Layout,
    schema: Schema,
    settings: dict[str, Any],
    pieces: Sequence[Piece],
    blocks: Callable[[Sequence[Piece]], Iterator[Block]],
    tell: Tell,
    notes: Callable[[], list[str]],
) -> None:
    digest = digest_of(json.dumps(settings, sort_keys=True))
    try:
        filling = Filling(target, layout, pieces[-1].stop, digest)
    except BlockingIOError as error:
        raise DataError(
            "another process is writing this folder",
            where=str(target),
            do="wait for it, or choose another target",
        ) from error
    with closing(filling):
        for piece, block in zip(pieces, blocks(pieces), strict=True):
            if len(block) < piece.stop - piece.start:
                raise DataError(
                    f"{piece.stop - piece.start - len(block):,} rows could not be made, and the "
                    "places of rows in a row cache are counted in advance",
                    where=str(target),
                    do="remove or mend these rows, or convert to TFRecord or Parquet",
                )
            filling.put(np.arange(piece.start, piece.stop), dict(block.columns))
            tell(piece.stop, "")
        old = _make_room(target)
        filling.finish(None, {"schema": schema.dumps(), "settings": settings, "notes": notes()})
    flush_folder(target.parent)
    _remove_old(target, old)


def _make_room(target: Path) -> Path | None:
    if not target.exists():
        return None
    old = target.with_name(f".{target.name}{unfinished.new_name()}")
    os.rename(target, old)
    return old


def _remove_old(target: Path, old: Path | None = None) -> None:
    if old is not None:
        _remove(old)
    start = f".{target.name}"
    for name in os.listdir(target.parent):
        if name.startswith(start) and unfinished.is_abandoned(name.removeprefix(start)):
            _remove(target.with_name(name))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
