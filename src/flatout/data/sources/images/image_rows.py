"""Images by index, decoded when they are needed, for any storage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flatout.data.reading.block import Block, Numbers, Values
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import Changes
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import File
from flatout.data.reading.origins import Gather, Rows, alone
from flatout.data.reading.schema import Column, Role, Schema
from flatout.data.sources.images.image_decode import (
    ImageForm,
    Resize,
    decode,
    has_simplejpeg,
    scratch_bytes,
)
from flatout.data.sources.images.image_files import Content
from flatout.data.sources.images.image_header import Damaged, Header
from flatout.errors import DataError
from flatout.words import counted

# Maximum number of classes that a description lists.
_TOLD = 3


class ImageOptions(NamedTuple):
    """A user's settings about images.

    Attributes:
        channels: 1 or 3.
        size: height and width, or None for the size of the images.
        resize: how images are resized to `size`; None: they must have this size.
        reduced: whether a JPEG is decoded at reduced size if that is enough.
        classes: names of classes in the order of their numbers; None for the names in the storage.
        image: the role of the column `image`.
        label: the role of the column `label`; None if there are no classes.
    """

    channels: int
    size: tuple[int, int] | None
    resize: Resize | None
    reduced: bool
    classes: tuple[str, ...] | None
    image: Role
    label: Role | None


class Images(Protocol):
    """Images in their storage. Several threads may call at once.

    Attributes:
        headers: facts about each image, an array with the fields of `Header`.
        labels: each image's class, int64 of shape (images,); None without labels.
        classes: names of the classes, by index; () without labels.
    """

    headers: npt.NDArray[Any]
    labels: npt.NDArray[np.int64] | None
    classes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hex digits that differ for other images."""
        ...

    def contents(self, numbers: Numbers, buffers: Buffers) -> Content:
        """Return a function from the position in `numbers` to the image's bytes.

        The function raises `Damaged` for an image that has changed.
        """
        ...

    def where(self, number: int) -> str: ...

    def notes(self) -> list[str]: ...


class ImageRows(Rows):
    """Images by index. Follows `flatout.data.reading.origins.Rows`.

    Attributes:
        classes: names of the classes, by index; () without labels.
    """

    random = True

    def __init__(self, images: Images, wanted: ImageOptions, policy: ErrorPolicy) -> None:
        self._images = images
        self._policy = policy
        self._changes = Changes()
        self._bad: set[int] = set()  # images that cannot be read
        # Index, error and location of bad images that were not reported to other ranks yet.
        self._new: list[tuple[int, str, str]] = []
        self.rows = len(images.headers)
        self.classes = images.classes
        size = wanted.size
        if wanted.resize is None:
            size = _one_size(images, wanted.size)
        assert size is not None
        self._look = ImageForm(size, wanted.resize or "stretch", wanted.channels, wanted.reduced)
        self.schema = _schema(wanted, self._look, self.classes)
        self._notes = [*images.notes(), *self._class_notes(), *self._decoder_notes()]

    @property
    def files(self) -> Sequence[File]:
        files: Sequence[File] = getattr(self._images, "files", ())
        return files

    @property
    def paths(self) -> Sequence[str]:
        paths: Sequence[str] = getattr(self._images, "paths", ())
        return paths or [file.path for file in self.files]

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.schema.dumps().encode())
        digest.update(self._images.digest.encode())
        if self._images.labels is not None:
            digest.update(self._images.labels.tobytes())
        return digest.hexdigest()[:16]

    def row_stamps(self, numbers: Numbers | None = None) -> list[str] | None:
        stamps = getattr(self._images, "stamps", None)
        return None if stamps is None else stamps(numbers)

    def input_words(self) -> str:
        return f"{self.schema.format} {self._look}"

    def row_keys(self) -> list[str] | None:
        keys: list[str] | None = getattr(self._images, "keys", None)
        return keys

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        look = self._look
        headers = self._headers_of(numbers)
        content = self._images.contents(numbers, buffers)
        pixels = buffers.empty((len(numbers), *look.size, look.channels), np.uint8)
        largest = max((scratch_bytes(header, look) for header in headers), default=0)
        scratch = buffers.empty(largest, np.uint8)
        kept: list[int] = []
        for place, number in enumerate(numbers.tolist()):
            if number in self._bad:
                continue  # an image is counted once over all epochs
            lost: set[str] = set()
            try:
                decode(content(place), headers[place], look, pixels[len(kept)], scratch, lost)
                kept.append(number)
            except Damaged as error:
                self._skip(number, str(error), self.where(number))
                self._new.append((number, str(error), self.where(number)))
            for change in lost:
                self._changes.add(change, f"{self.where(number)}: {change}")
        good = np.array(kept, np.int64)
        columns: dict[str, Values] = {"image": pixels[: len(kept)].transpose(0, 3, 1, 2)}
        if self._images.labels is not None:
            columns["label"] = self._images.labels[good]
        return Block(columns, good)

    def _skip(self, number: int, what: str, where: str) -> None:
        self._policy.bad(what, where)
        self._bad.add(number)

    def targets(self) -> npt.NDArray[Any] | None:
        return self._images.labels

    def where(self, number: int) -> str:
        return self._images.where(number)

    def describe(self) -> str:
        look = self._look
        words = f"{counted(self.rows, 'image')} of {look.channels}x{look.size[0]}x{look.size[1]}"
        if self._images.labels is None:
            return words
        counts = np.bincount(self._images.labels, minlength=len(self.classes))
        each = [f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True)]
        listed = ", ".join(each) if len(each) <= _TOLD else f"{each[0]} … {each[-1]}"
        return f"{words}, {counted(len(each), 'class', 'classes')} ({listed})"

    def skipped(self, gather: Gather = alone) -> list[str]:
        changed = self._changes.new_notes(gather)
        if not self._policy.skip:
            return changed
        new = self._new[:]  # threads may add images meanwhile
        del self._new[: len(new)]
        mine = [self.digest, new]
        for digest, theirs in (answer for answer in gather(mine) if answer != mine):
            for number, what, where in theirs:
                if digest != self.digest:
                    self._policy.bad(what, where)
                elif number not in self._bad:
                    self._skip(number, what, where)
        return [*changed, *self._policy.new_notes()]

    def notes(self) -> list[str]:
        return [*self._changes.notes(), *self._policy.notes(), *self._notes]

    def _headers_of(self, numbers: Numbers) -> list[Header]:
        return [Header(*fields) for fields in self._images.headers[numbers].tolist()]

    def _class_notes(self) -> list[str]:
        if self._images.labels is None:
            return []
        counts = np.bincount(self._images.labels, minlength=len(self.classes))
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        return [f"classes without an image: {', '.join(empty)}"] if empty else []

    def _decoder_notes(self) -> list[str]:
        if has_simplejpeg() or not self._images.headers["plain_jpeg"].any():
            return []
        return [
            "simplejpeg is absent: Pillow decodes JPEG, more slowly, and notices only damage that "
            "cuts a file short; pip install simplejpeg"
        ]


def _one_size(images: Images, wanted: tuple[int, int] | None) -> tuple[int, int]:
    headers = images.headers
    height, width = wanted or (int(headers["height"][0]), int(headers["width"][0]))
    others = np.flatnonzero((headers["height"] != height) | (headers["width"] != width))
    if len(others):
        first = int(others[0])
        same = "the schema" if wanted else images.where(0)
        raise DataError(
            f"expected images of one size: {height} x {width} in {same}, "
            f"{headers['height'][first]} x {headers['width'][first]} in {images.where(first)}",
            do="pass size=, which resizes them",
        )
    return height, width


def _schema(wanted: ImageOptions, look: ImageForm, classes: tuple[str, ...]) -> Schema:
    options: dict[str, Any] = {}
    if wanted.resize is not None:
        options["resize"] = wanted.resize
    if look.reduced:
        options["reduced"] = True
    columns = [
        Column(name="image", dtype="uint8", shape=(look.channels, *look.size), role=wanted.image)
    ]
    if wanted.label is not None:
        columns.append(Column(name="label", dtype="int64", role=wanted.label))
        options["classes"] = list(classes)
    return Schema(format="images", columns=tuple(columns), options=options)
