"""Image files without decoding, which `flatout data convert` packs into shards."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from flatout.data.digests.digests import digest_of
from flatout.data.reading.block import Block, Numbers, Ragged, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import Paths
from flatout.data.reading.schema import Column, Schema
from flatout.data.sources.images.image_files import ImageFolders, check_no_splits, find_images
from flatout.data.sources.images.image_header import Damaged
from flatout.words import counted, size_words


class ImageBytes:
    """Image files by index. Follows `flatout.data.reading.origins.Rows`.

    A row has `image` (the file's bytes) and `path` (the bytes of its path within the given folder).
    If there are class folders, it also has `label` (int64, the number of its class folder). The
    schema's option `classes` names the classes.

    Attributes:
        headers: facts in the images' headers; an array with the fields of `image_header.Header`.
        classes: names of the class folders, sorted; () where there are none.
    """

    random = True

    def __init__(self, paths: Paths, policy: ErrorPolicy) -> None:
        found = find_images(paths)
        check_no_splits(found, paths, takes_classes=False)
        labeled = any(entry.folder for entry in found.entries)
        self._images = ImageFolders(found, labeled, None, policy)
        self._policy = policy
        self._skipped: set[int] = set()
        self.headers, self.classes = self._images.headers, self._images.classes
        self.paths = self._images.paths
        self.rows = len(self.headers)
        self.schema = _schema(self.classes)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the schema, and each file's key, size and first 4096 bytes."""
        return digest_of(self.schema.dumps(), self._images.digest)

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        contents, kept = [], []
        for number in numbers.tolist():
            if number in self._skipped:
                continue
            try:
                contents.append(self._images.content(number))
                kept.append(number)
            except Damaged as error:
                self._policy.bad(str(error), self.where(number))
                self._skipped.add(number)
        good = np.array(kept, np.int64)
        keys = self._images.keys
        paths = [keys[number].encode(errors="surrogateescape") for number in kept]
        columns: dict[str, Any] = {"image": _ragged(contents), "path": _ragged(paths)}
        if self._images.labels is not None:
            columns["label"] = self._images.labels[good]
        return Block({column.name: columns[column.name] for column in self.schema.columns}, good)

    def targets(self) -> npt.NDArray[Any] | None:
        return self._images.labels

    def lengths(self) -> Numbers | None:
        return np.asarray(self.headers["bytes"], np.int64)

    def where(self, number: int) -> str:
        return self._images.where(number)

    def describe(self) -> str:
        size = int(self.headers["bytes"].sum())
        classes = f", {len(self.classes):,} classes" if self.classes else ""
        return f"{counted(self.rows, 'image file')}, {size_words(size)}{classes}"

    def notes(self) -> list[str]:
        return [*self._policy.notes(), *self._images.notes()]


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
