"""An image file a row: found and looked at when it is opened, decoded when it is wanted."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flatout.data.block import Block, Numbers, Values
from flatout.data.buffers import Buffers
from flatout.data.faults import Faults
from flatout.data.files import Paths
from flatout.data.schema import Column, Role, Schema
from flatout.data.sources.image_decode import (
    HAVE_SIMPLEJPEG,
    Look,
    Pixels,
    Resize,
    decode,
    psnr,
    scratch_bytes,
)
from flatout.data.sources.image_files import (
    Entry,
    Found,
    find_images,
    open_images,
    read_bytes,
    short_name,
)
from flatout.data.sources.image_header import Damaged, Header
from flatout.errors import DataError

# Images on which the loss of a reduced decode is measured.
_MEASURED = 8
_TOLD = 3


class Wanted(NamedTuple):
    """What is asked for.

    Attributes:
        channels: 3 or 1.
        size: height and width, or None for that of the images.
        resize: how images come to that size; None: they must have it.
        reduced: decode JPEG reduced where that is enough.
        classes: in the order of their numbers; None for the sorted names of the folders.
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


class ImageRows:
    """Images by number. Follows `flatout.data.rows.Rows`.

    Args:
        paths: as `flatout.data.images` takes them.
        wanted: what to make of them.
        faults: what to do about images that cannot be read.

    Attributes:
        classes: names of the classes, by number; () without labels.

    Raises:
        DataError: see `flatout.data.images`.
    """

    random = True

    def __init__(self, paths: Paths, wanted: Wanted, faults: Faults) -> None:
        found = find_images(paths)
        self.classes = () if wanted.label is None else _classes(found, wanted.classes)
        self._faults = faults
        self._bad: set[int] = set()
        self._entries, self._headers = open_images(found.entries, faults)
        self.rows = len(self._entries)
        self._labels = None if wanted.label is None else _labels(self._entries, self.classes)
        size = wanted.size
        if wanted.resize is None:
            size = _one_size(self._entries, self._headers, wanted.size)
        assert size is not None
        self._look = Look(size, wanted.resize or "stretch", wanted.channels, wanted.reduced)
        self.schema = _schema(wanted, self._look, self.classes)
        self._notes = [*self._file_notes(found.others), *self._reduction_notes()]

    def __getstate__(self) -> dict[str, Any]:
        # Another process counts for itself.
        return {**self.__dict__, "_faults": (self._faults.skip, self._faults.max_errors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        skip, max_errors = state["_faults"]
        self.__dict__.update(state)
        self._faults = Faults("skip" if skip else "fail", max_errors)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over the schema, and each image's key, label, size and first 4096 bytes."""
        digest = hashlib.sha256(self.schema.dumps().encode())
        for entry in self._entries:
            digest.update(entry.key.encode(errors="surrogateescape") + b"\0")
        known = [self._headers["bytes"], self._headers["check"], self._labels]
        for numbers in known:
            digest.update(b"" if numbers is None else numbers.tobytes())
        return digest.hexdigest()[:16]

    def take(self, numbers: Numbers, buffers: Buffers) -> Block:
        """Decode these images, in this order.

        Returns:
            `image`, uint8 of shape (rows, channels, height, width) in channels_last memory, and
            `label`, int64 of shape (rows,).

        Raises:
            DataError: an image is damaged, or its file has changed or gone.
        """
        look = self._look
        headers = self._headers_of(numbers)
        pixels = buffers.empty((len(numbers), *look.size, look.channels), np.uint8)
        largest = max((scratch_bytes(header, look) for header in headers), default=0)
        scratch = buffers.empty(largest, np.uint8)
        kept: list[int] = []
        for number, header in zip(numbers.tolist(), headers, strict=True):
            if self._decode(number, header, pixels[len(kept)], scratch):
                kept.append(number)
        good = np.array(kept, np.int64)
        columns: dict[str, Values] = {"image": pixels[: len(kept)].transpose(0, 3, 1, 2)}
        if self._labels is not None:
            columns["label"] = self._labels[good]
        return Block(columns, good)

    def targets(self) -> npt.NDArray[Any] | None:
        """The classes' numbers, int64 of shape (rows,); None without labels."""
        return self._labels

    def lengths(self) -> Numbers | None:
        """None: all images are of one size."""
        return None

    def where(self, number: int) -> str:
        """The image's file."""
        return short_name(self._entries[number].name)

    def describe(self) -> str:
        """Such as "83,484 images of 3x224x224, 4 classes (CNV 37,205 … NORMAL 26,315)"."""
        look = self._look
        words = f"{_count(self.rows, 'image')} of {look.channels}x{look.size[0]}x{look.size[1]}"
        if self._labels is None:
            return words
        counts = np.bincount(self._labels, minlength=len(self.classes))
        each = [f"{name} {count:,}" for name, count in zip(self.classes, counts, strict=True)]
        listed = ", ".join(each) if len(each) <= _TOLD else f"{each[0]} … {each[-1]}"
        return f"{words}, {_count(len(each), 'class', 'classes')} ({listed})"

    def notes(self) -> list[str]:
        """What was skipped or not read, and what a reduced decode costs."""
        return [*self._faults.notes(), *self._notes]

    def _headers_of(self, numbers: Numbers) -> list[Header]:
        return [Header(*fields) for fields in self._headers[numbers].tolist()]

    def _decode(self, number: int, header: Header, out: Pixels, scratch: Pixels) -> bool:
        """Decode an image into `out`; False where it is bad, and to be skipped."""
        if number in self._bad:
            return False
        try:
            decode(read_bytes(self._entries[number], header), header, self._look, out, scratch)
        except Damaged as error:
            self._faults.bad(str(error), self.where(number))
            # Counted once, however many epochs meet it.
            self._bad.add(number)
            return False
        return True

    def _file_notes(self, others: Sequence[str]) -> list[str]:
        notes = []
        if others:
            more = ", …" if len(others) > _TOLD else ""
            names = ", ".join(map(short_name, others[:_TOLD])) + more
            notes.append(f"{_count(len(others), 'file')} not read, by name no image: {names}")
        if self._labels is not None:
            counts = np.bincount(self._labels, minlength=len(self.classes))
            empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
            if empty:
                notes.append(f"no images are in the folders of {', '.join(empty)}")
        if not HAVE_SIMPLEJPEG and self._headers["plain_jpeg"].any():
            notes.append(
                "simplejpeg is absent: Pillow decodes JPEG, more slowly, and notices only damage "
                "that cuts a file short; pip install simplejpeg"
            )
        return notes

    def _reduction_notes(self) -> list[str]:
        """What a reduced decode changes, measured on images spread over the data."""
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
        """PSNR of the reduced against the full decode, of those images that can be decoded."""
        full = replace(self._look, reduced=False)
        shape = (*full.size, full.channels)
        for number, header in zip(numbers.tolist(), self._headers_of(numbers), strict=True):
            ours, reference = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
            scratch = np.empty(scratch_bytes(header, full), np.uint8)
            try:
                data = read_bytes(self._entries[number], header)
                decode(data, header, self._look, ours, scratch)
                decode(data, header, full, reference, scratch)
            except Damaged:
                continue  # `take` says so, if it comes to that
            yield psnr(ours, reference)


def _classes(found: Found, given: tuple[str, ...] | None) -> tuple[str, ...]:
    """The classes' names by number, once every image has one."""
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


def _one_size(
    entries: Sequence[Entry], headers: npt.NDArray[Any], wanted: tuple[int, int] | None
) -> tuple[int, int]:
    """Height and width of all images."""
    height, width = wanted or (int(headers["height"][0]), int(headers["width"][0]))
    others = np.flatnonzero((headers["height"] != height) | (headers["width"] != width))
    if len(others):
        other = headers[others[0]]
        same = "the schema" if wanted else short_name(entries[0].name)
        raise DataError(
            f"expected images of one size: {height} x {width} in {same}, "
            f"{other['height']} x {other['width']} in {short_name(entries[others[0]].name)}",
            do="pass size=, which resizes them",
        )
    return height, width


def _schema(wanted: Wanted, look: Look, classes: tuple[str, ...]) -> Schema:
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


def _count(count: int, one: str, more: str = "") -> str:
    return f"{count:,} {one if count == 1 else more or one + 's'}"
