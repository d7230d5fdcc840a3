"""Images by number, decoded when they are wanted, wherever they are stored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from time import monotonic, sleep
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers, Values
from flatout.data.buffers import Buffers
from flatout.data.error_policy import ErrorPolicy
from flatout.data.files import File
from flatout.data.origins import Gather, Rows, alone
from flatout.data.schema import Column, Role, Schema
from flatout.data.sources.image_decode import (
    HAVE_SIMPLEJPEG,
    ImageForm,
    Resize,
    decode,
    psnr,
    scratch_bytes,
)
from flatout.data.sources.image_files import Content
from flatout.data.sources.image_header import Damaged, Header
from flatout.errors import DataError
from flatout.words import counted

# Images on which the loss of a reduced decode is measured.
_MEASURED = 8
_TOLD = 3
# A file that is being written is read again after so long, for so long.
_PAUSE_S, _WRITTEN_S = 0.1, 5.0


class ImageOptions(NamedTuple):
    """What is asked for.

    Attributes:
        channels: 3 or 1.
        size: height and width, or None for that of the images.
        resize: how images come to that size; None: they must have it.
        reduced: decode JPEG reduced where that is enough.
        classes: in the order of their numbers; None for what the images' store calls them.
        image: the role of the column `image`.
        label: the role of the column `label`; None where there are no classes.
    """

    channels: int
    size: tuple[int, int] | None
    resize: Resize | None
    reduced: bool
    classes: tuple[str, ...] | None
    image: Role
    label: Role | None


class Images(Protocol):
    """Images as they are stored. Several threads may call at once.

    Attributes:
        headers: what is known of each, an array with the fields of `Header`.
        labels: each one's class, int64 of shape (images,); None without labels.
        classes: names of the classes, by number; () without labels.
    """

    headers: npt.NDArray[Any]
    labels: npt.NDArray[np.int64] | None
    classes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hex digits that differ for other images."""
        ...

    def contents(self, numbers: Numbers, buffers: Buffers) -> Content:
        """What gives an image by its place in `numbers`, as it is by then.

        It raises `Damaged` for one that has gone, or is no image any more.
        """
        ...

    def stamp(self, number: int) -> str:
        """What differs where an image was written or replaced; "" where that is an error."""
        ...

    def is_written_since(self, number: int) -> bool:
        """Whether an image was written since these were opened."""
        ...

    def where(self, number: int) -> str:
        """Where an image is stored."""
        ...

    def notes(self) -> list[str]:
        """What was not read."""
        ...


class ImageRows(Rows):
    """Images by number. Follows `flatout.data.origins.Rows`.

    Attributes:
        classes: names of the classes, by number; () without labels.
    """

    random = True

    def __init__(self, images: Images, wanted: ImageOptions, policy: ErrorPolicy) -> None:
        self._images = images
        self._policy = policy
        self._bad: dict[int, str] = {}  # images that cannot be read, with their stamps then
        # Of these, and of those that could be read later, what other ranks are not told yet.
        self._new: list[list[Any]] = []  # number, what, where and stamp
        self._again: list[list[Any]] = []  # number and where
        self.rows = len(images.headers)
        self.classes = images.classes
        size, self._is_resized = wanted.size, wanted.resize is not None
        if not self._is_resized:
            size = _one_size(images, wanted.size)
        assert size is not None
        self._look = ImageForm(size, wanted.resize or "stretch", wanted.channels, wanted.reduced)
        self.schema = _schema(wanted, self._look, self.classes)
        self._notes = [*images.notes(), *self._class_notes(), *self._decoder_notes()]
        self._notes += self._reduction_notes()

    @property
    def files(self) -> Sequence[File]:
        """Those that hold many images each."""
        files: Sequence[File] = getattr(self._images, "files", ())
        return files

    @property
    def paths(self) -> Sequence[str]:
        """Of all files that are read."""
        paths: Sequence[str] = getattr(self._images, "paths", ())
        return paths or [file.path for file in self.files]

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the schema, the stored images and their labels."""
        digest = hashlib.sha256(self.schema.dumps().encode())
        digest.update(self._images.digest.encode())
        if self._images.labels is not None:
            digest.update(self._images.labels.tobytes())
        return digest.hexdigest()[:16]

    def row_stamps(self, numbers: Numbers | None = None) -> list[str] | None:
        """What each row is read from, where images lie in their own files."""
        stamps = getattr(self._images, "stamps", None)
        return None if stamps is None else stamps(numbers)

    def input_words(self) -> str:
        """What becomes of an image, whether or not it has a label."""
        return f"{self.schema.format} {self._look}"

    def row_keys(self) -> list[str] | None:
        """Paths within the folder, where images lie in their own files."""
        keys: list[str] | None = getattr(self._images, "keys", None)
        return keys

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        """Decode these images, in this order."""
        look = self._look
        headers = self._headers_of(numbers)
        content = self._images.contents(numbers, buffers)
        pixels = buffers.empty((len(numbers), *look.size, look.channels), np.uint8)
        largest = max((scratch_bytes(header, look) for header in headers), default=0)
        scratch = buffers.empty(largest, np.uint8)
        kept: list[int] = []
        for place, number in enumerate(numbers.tolist()):
            known = self._bad.get(number)
            if known is not None and known == self._images.stamp(number):
                continue  # counted once, however many epochs meet it
            read = partial(content, place, headers[place])
            room = self._decoded(number, read, headers[place], pixels[len(kept)], scratch)
            if room is not None:
                scratch = room
                kept.append(number)
        good = np.array(kept, np.int64)
        columns: dict[str, Values] = {"image": pixels[: len(kept)].transpose(0, 3, 1, 2)}
        if self._images.labels is not None:
            columns["label"] = self._images.labels[good]
        return Block(columns, good)

    def _decoded(
        self,
        number: int,
        read: Callable[[], tuple[bytes | memoryview, Header]],
        header: Header,
        out: npt.NDArray[np.uint8],
        scratch: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.uint8] | None:
        """Decode an image; once more, or until it is whole, where its file is being written."""
        before, until = "", monotonic() + _WRITTEN_S
        while True:
            try:
                data, now = read()
                if now is not header:
                    scratch = self._room_for(now, scratch)
                decode(data, now, self._look, out, scratch)
            except Damaged as error:
                stamp = self._images.stamp(number)
                if stamp == before or monotonic() > until:
                    self._skip(number, str(error), stamp if stamp == before else "")
                    return None
                before = stamp
                if self._images.is_written_since(number):
                    sleep(_PAUSE_S)
            else:
                break
        if self._bad.pop(number, None) is not None:
            self._policy.good(self.where(number))
            self._again.append([number, self.where(number)])
        return scratch

    def _skip(self, number: int, what: str, stamp: str) -> None:
        if number not in self._bad:
            self._policy.bad(what, self.where(number))
            self._new.append([number, what, self.where(number), stamp])
        self._bad[number] = stamp

    def _room_for(self, header: Header, scratch: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        height, width = self._look.size
        if not self._is_resized and (header.height, header.width) != (height, width):
            raise Damaged(
                f"expected {height} x {width} pixels, found {header.height} x {header.width}: the "
                "file was replaced since it was opened"
            )
        size = scratch_bytes(header, self._look)
        return scratch if len(scratch) >= size else np.empty(size, np.uint8)

    def targets(self) -> npt.NDArray[Any] | None:
        """The classes' numbers, int64 of shape (rows,); None without labels."""
        return self._images.labels

    def where(self, number: int) -> str:
        """Where the image is stored."""
        return self._images.where(number)

    def describe(self) -> str:
        """Such as "83,484 images of 3x224x224, 4 classes (CNV 37,205 … NORMAL 26,315)"."""
        look = self._look
        words = f"{counted(self.rows, 'image')} of {look.channels}x{look.size[0]}x{look.size[1]}"
        if self._images.labels is None:
            return words
        counts = np.bincount(self._images.labels, minlength=len(self.classes))
        each = [f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True)]
        listed = ", ".join(each) if len(each) <= _TOLD else f"{each[0]} … {each[-1]}"
        return f"{words}, {counted(len(each), 'class', 'classes')} ({listed})"

    def skipped(self, gather: Gather = alone) -> list[str]:
        """How many images any rank has skipped since this was asked last, and which."""
        if not self._policy.skip:
            return []
        # Threads may add to these lists meanwhile.
        new, again = self._new[:], self._again[:]
        del self._new[: len(new)], self._again[: len(again)]
        mine = [self.digest, new, again]
        for theirs in gather(mine):
            if theirs != mine:
                self._take_over(*theirs)
        return self._policy.new_notes()

    def _take_over(self, digest: str, new: list[list[Any]], again: list[list[Any]]) -> None:
        """Count what another rank has skipped, or read again, and do so where rows are the same."""
        is_same = digest == self.digest
        for number, what, where, stamp in new:
            if not is_same or number not in self._bad:
                self._policy.bad(what, where)
            if is_same:
                self._bad.setdefault(number, stamp)
        for number, where in again:
            if not is_same or self._bad.pop(number, None) is not None:
                self._policy.good(where)

    def notes(self) -> list[str]:
        """What was skipped or not read, and what a reduced decode costs."""
        return [*self._policy.notes(), *self._notes]

    def _headers_of(self, numbers: Numbers) -> list[Header]:
        return [Header(*fields) for fields in self._images.headers[numbers].tolist()]

    def _class_notes(self) -> list[str]:
        if self._images.labels is None:
            return []
        counts = np.bincount(self._images.labels, minlength=len(self.classes))
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        return [f"classes without an image: {', '.join(empty)}"] if empty else []

    def _decoder_notes(self) -> list[str]:
        if HAVE_SIMPLEJPEG or not self._images.headers["plain_jpeg"].any():
            return []
        return [
            "simplejpeg is absent: Pillow decodes JPEG, more slowly, and notices only damage that "
            "cuts a file short; pip install simplejpeg"
        ]

    def _reduction_notes(self) -> list[str]:
        if not self._look.reduced:
            return []
        spread = np.unique(np.linspace(0, self.rows - 1, _MEASURED).astype(np.int64))
        losses = list(self._losses(spread))
        if not losses:
            return []
        if min(losses) == math.inf:
            return ["reduced decode changes nothing here: no JPEG is large enough for it"]
        return [
            f"reduced decode changes pixels: against the full decode PSNR is {min(losses):.1f} dB "
            f"at worst and {np.median(losses):.1f} dB in the middle of {len(losses)} images"
        ]

    def _losses(self, numbers: Numbers) -> Iterator[float]:
        full = replace(self._look, reduced=False)
        shape = (*full.size, full.channels)
        content = self._images.contents(numbers, Buffers())
        for place, header in enumerate(self._headers_of(numbers)):
            ours, reference = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
            scratch = np.empty(scratch_bytes(header, full), np.uint8)
            try:
                data, _ = content(place, header)
                decode(data, header, self._look, ours, scratch)
                decode(data, header, full, reference, scratch)
            except Damaged:
                continue  # `take` says so, if it comes to that
            yield psnr(ours, reference)


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
