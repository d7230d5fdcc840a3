"""Image files as they are, without decoding them: what `flatout data convert` packs into shards."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers, Ragged, offsets_of
from flatout.data.buffers import Buffers
from flatout.data.error_policy import ErrorPolicy
from flatout.data.files import Paths
from flatout.data.schema import Column, Schema
from flatout.data.sources.image_files import (
    Entry,
    check_no_splits,
    find_images,
    open_images,
    read_bytes,
    short_name,
)
from flatout.data.sources.image_header import Damaged, Header
from flatout.errors import DataError
from flatout.words import counted, size_words


class ImageBytes:
    """Image files by number. Follows `flatout.data.origins.Rows`.

    A row is `image` (the file's bytes), `label` (int64, the number of its class folder, where there
    are such folders) and `path` (the bytes of its path within the folder that was named). The
    schema's option `classes` names the classes.

    Attributes:
        entries: the files.
        headers: what their headers say; an array with the fields of `image_header.Header`.
        classes: names of the class folders, sorted; () where there are none.
        others: names of files that are not read, because their names are not those of images.
    """

    random = True

    def __init__(self, paths: Paths, policy: ErrorPolicy) -> None:
        result = find_images(paths)
        check_no_splits(result, paths, takes_classes=False)
        self._policy = policy
        self._skipped: set[int] = set()
        self.others = result.others
        self.entries, self.headers = open_images(result.entries, policy)
        self.rows = len(self.entries)
        self.classes = _classes(self.entries, result.folders)
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._labels = None
        if self.classes:
            self._labels = np.array([numbers[entry.folder] for entry in self.entries], np.int64)
        self.schema = _schema(self.classes)

    def __getstate__(self) -> dict[str, Any]:
        # Another process counts for itself.
        return {**self.__dict__, "_policy": (self._policy.skip, self._policy.max_errors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        skip, max_errors = state["_policy"]
        self.__dict__.update(state)
        self._policy = ErrorPolicy("skip" if skip else "fail", max_errors)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the schema, and each file's key, size and first 4096 bytes."""
        digest = hashlib.sha256(self.schema.dumps().encode())
        for entry in self.entries:
            digest.update(entry.key.encode(errors="surrogateescape") + b"\0")
        for field in ("bytes", "check"):
            digest.update(np.ascontiguousarray(self.headers[field]).tobytes())
        return digest.hexdigest()[:16]

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        """The bytes of these files, in this order."""
        contents, kept = [], []
        for number in numbers.tolist():
            content = self._content(number)
            if content is not None:
                contents.append(content)
                kept.append(number)
        good = np.array(kept, np.int64)
        paths = [self.entries[number].key.encode(errors="surrogateescape") for number in kept]
        columns: dict[str, Any] = {"image": _ragged(contents), "path": _ragged(paths)}
        if self._labels is not None:
            columns["label"] = self._labels[good]
        return Block({column.name: columns[column.name] for column in self.schema.columns}, good)

    def _content(self, number: int) -> bytes | None:
        if number in self._skipped:
            return None
        try:
            return read_bytes(self.entries[number], Header(*self.headers[number].tolist()))
        except Damaged as error:
            self._policy.bad(str(error), self.where(number))
            self._skipped.add(number)
            return None

    def targets(self) -> npt.NDArray[Any] | None:
        """The classes' numbers, int64 of shape (rows,); None without class folders."""
        return self._labels

    def lengths(self) -> Numbers | None:
        """Bytes of each file."""
        return np.asarray(self.headers["bytes"], np.int64)

    def where(self, number: int) -> str:
        """The file."""
        return short_name(self.entries[number].name)

    def describe(self) -> str:
        """Such as "83,484 image files, 5.8 GB, 4 classes"."""
        size = int(self.headers["bytes"].sum())
        classes = f", {len(self.classes):,} classes" if self.classes else ""
        return f"{counted(self.rows, 'image file')}, {size_words(size)}{classes}"

    def notes(self) -> list[str]:
        """What was skipped or not read."""
        notes = self._policy.notes()
        if self.others:
            more = ", …" if len(self.others) > 3 else ""
            names = ", ".join(map(short_name, self.others[:3])) + more
            files = "file" if len(self.others) == 1 else "files"
            notes.append(f"{len(self.others):,} {files} not read, by name no image: {names}")
        return notes


def _classes(entries: list[Entry], folders: list[str]) -> tuple[str, ...]:
    outside = [entry for entry in entries if not entry.folder]
    if len(outside) == len(entries):
        return ()
    if outside:
        raise DataError(
            f"{len(outside):,} of {len(entries):,} images are in no class folder, such as "
            f"{os.path.basename(outside[0].name)}",
            where=short_name(os.path.dirname(outside[0].name)),
            do="move them to a folder per class, or away",
        )
    return tuple(folders)


def _schema(classes: tuple[str, ...]) -> Schema:
    columns = [Column(name="image", dtype="uint8", ragged=True)]
    if classes:
        columns.append(Column(name="label", dtype="int64", role="target"))
    columns.append(Column(name="path", dtype="uint8", ragged=True, role="unused"))
    options = {"classes": list(classes)} if classes else {}
    return Schema(format="image_bytes", columns=tuple(columns), options=options)


def _ragged(parts: list[bytes]) -> Ragged:
    values = np.frombuffer(b"".join(parts), np.uint8)
    return Ragged(values, offsets_of([len(part) for part in parts]))
