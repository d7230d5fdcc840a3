"""Image files whose folders are their classes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import stamp_of
from flatout.data.sources.images.image_files import (
    Content,
    Entry,
    ImageListing,
    open_images,
    read_image,
    short_name,
)
from flatout.data.sources.images.image_header import Header
from flatout.errors import DataError

# Maximum number of skipped files that a note names.
_TOLD = 3


class ImageFolders:
    """Image files by index. Follows `flatout.data.sources.images.image_rows.Images`."""

    def __init__(
        self,
        files: ImageListing,
        labeled: bool,
        classes: tuple[str, ...] | None,
        policy: ErrorPolicy,
    ) -> None:
        self.classes = _classes(files, classes) if labeled else ()
        self._entries, self.headers = open_images(files.entries, policy)
        self.labels = _labels(self._entries, self.classes) if labeled else None
        self._others = files.others

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for entry in self._entries:
            digest.update(entry.key.encode(errors="surrogateescape") + b"\0")
        for field in ("bytes", "check"):
            digest.update(self.headers[field].tobytes())
        return digest.hexdigest()

    @property
    def paths(self) -> list[str]:
        return [entry.path for entry in self._entries]

    @property
    def keys(self) -> list[str]:
        """Paths of the images within the given folder, by index."""
        return [entry.key for entry in self._entries]

    def stamps(self, numbers: Numbers | None = None) -> list[str]:
        """Return texts that identify images, and that differ if an image was replaced."""
        chosen = range(len(self._entries)) if numbers is None else numbers.tolist()
        entries = [self._entries[number] for number in chosen]
        return [f"{entry.key}\n{stamp_of(entry.path)}" for entry in entries]

    def contents(self, numbers: Numbers, buffers: Buffers) -> Content:
        """Return a function from the position in `numbers` to the image's bytes, which it reads."""
        return lambda place: self.content(int(numbers[place]))

    def content(self, number: int) -> bytes:
        return read_image(self._entries[number], Header(*self.headers[number].tolist()))

    def where(self, number: int) -> str:
        return short_name(self._entries[number].name)

    def notes(self) -> list[str]:
        count = len(self._others)
        if not count:
            return []
        more = ", …" if count > _TOLD else ""
        names = ", ".join(map(short_name, self._others[:_TOLD])) + more
        files = "file" if count == 1 else "files"
        return [f"{count:,} {files} not read, by name no image: {names}"]


def _classes(found: ImageListing, given: tuple[str, ...] | None) -> tuple[str, ...]:
    outside = next((entry for entry in found.entries if not entry.folder), None)
    if outside is not None:
        what = "is in no class folder" if found.folders else "and others are in no class folders"
        raise DataError(
            f"expected a folder for each class, but {os.path.basename(outside.name)} {what}",
            where=short_name(os.path.dirname(outside.name)),
            do="move images to a folder per class, or pass labels=False",
        )
    if given is None:
        return tuple(found.folders)
    strange = next((entry for entry in found.entries if entry.folder not in given), None)
    if strange is not None:
        raise DataError(
            f"expected the classes {', '.join(given)}; found the folder {strange.folder!r}",
            where=short_name(strange.name),
        )
    return given


def _labels(entries: Sequence[Entry], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[entry.folder] for entry in entries], np.int64)
