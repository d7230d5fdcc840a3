"""Image files: finding them and their classes, and reading headers and contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from fsspec.core import url_to_fs

from flatout.data.reading.block import Numbers
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.files import Paths, find, stamp_of
from flatout.data.reading.threads import Pool
from flatout.data.sources.images.image_header import Damaged, Header, is_of, read_header
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


# Suffixes of image files.
_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp"),
    *(".tif", ".tiff", ".ppm", ".pgm", ".pnm", ".jp2"),
)
# A folder that archives made on macOS contain. Names with a leading dot are no data either.
_NO_CLASS = "__MACOSX"
# Threads that search folders and read headers.
_THREADS = 16
# Names of folders that hold parts of the data, each with class folders in it.
_SPLITS = (
    *("train", "training", "val", "valid", "validation", "dev"),
    *("test", "testing", "eval", "evaluation"),
)
# Headers that a thread reads in one task.
_PIECE = 256
# dtype of headers: an array, since there may be a million images.
HEADER = np.dtype(
    [
        ("height", np.int32),
        ("width", np.int32),
        ("orientation", np.uint8),
        ("plain_jpeg", np.bool_),
        ("bytes", np.int64),
        ("check", np.uint32),
    ]
)
# Returns the bytes of an image, for its position among the requested images.
Content: TypeAlias = Callable[[int], bytes | memoryview]


class Entry(NamedTuple):
    """An image file.

    Attributes:
        key: path within the given folder, or the file's name; equal on all machines.
        path: path on this machine.
        name: name in messages.
        folder: name of the class: the first folder below the given folder or, for a file given by
            its own name, the file's folder; "" where there is none.
    """

    key: str
    path: str
    name: str
    folder: str


class ImageListing(NamedTuple):
    """Image files that were found for some paths.

    Attributes:
        entries: the images, in an order that is equal on all machines: images directly in a folder
            first, then folder by folder, each sorted by key.
        folders: all class folders, also those without an image, sorted.
        others: names of files that are not read, since their names are not those of images.
    """

    entries: list[Entry]
    folders: list[str]
    others: list[str]


def check_no_splits(found: ImageListing, paths: Paths, *, takes_classes: bool) -> None:
    """Raise an error if the folders are not classes, but parts such as train and test."""
    splits = [name for name in found.folders if name.lower() in _SPLITS]
    if not splits:
        return
    # Among class folders, folders that hold folders are still parts of the data.
    nested = len(splits) > 1 and all(
        entry.key.count(os.sep) > 1 for entry in found.entries if entry.folder in splits
    )
    if len(splits) < len(found.folders) and not nested:
        return
    root = os.fspath(paths if isinstance(paths, (str, os.PathLike)) else next(iter(paths)))
    parts = [os.path.join(root, name) for name in splits]
    if takes_classes:
        parts = [f'images("{part}")' for part in parts]
    do = f"read each part by itself, as {' and '.join(parts)}"
    if not os.path.isdir(root):
        do = "name folders one level further down, where the classes are"
    raise DataError(
        f"expected a folder for each class, found {', '.join(map(repr, splits))}, which are parts "
        "of the data",
        where=root,
        do=f"{do}; if these are the classes, pass classes={splits}" if takes_classes else do,
    )


def find_images(paths: Paths) -> ImageListing:
    """Find the image files of `paths`.

    Folders of this machine are searched to any depth, following links. Of a folder's files, those
    with an image suffix are images. A file that is given by name or pattern is always an image.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise DataError("expected at least one path, found an empty list")
    local = "file://"
    parts = [_find_one(os.path.expanduser(os.fspath(path).removeprefix(local))) for path in given]
    return ImageListing(
        [entry for part in parts for entry in part.entries],
        sorted({folder for part in parts for folder in part.folders}),
        [name for part in parts for name in part.others],
    )


def _find_one(path: str) -> ImageListing:
    if os.path.isdir(path):
        files = _walk(path)
    elif "://" in path and not _is_image(path) and not any(sign in path for sign in "*?["):
        files = _elsewhere(path)
    else:
        entries = [
            Entry(os.path.basename(file.name), file.path, file.name, _parent(file.name))
            for file in find(path, unpack=False)
        ]
        return ImageListing(entries, sorted({entry.folder for entry in entries}), [])
    if not files.entries:
        beside = f", but other files, such as {files.others[0]}" if files.others else ""
        raise DataError(
            f"the folder holds no images{beside}",
            where=path,
            do=f"images end in {' '.join(_SUFFIXES)}; name others by a pattern",
        )
    return files


def _walk(root: str) -> ImageListing:
    root = os.path.abspath(root)
    try:
        top = [entry for entry in os.scandir(root) if _is_data(entry.name)]
        folders = sorted(entry.name for entry in top if entry.is_dir())
        inside = sorted(entry.name for entry in top if not entry.is_dir())
        with Pool(_THREADS) as pool:
            for item in pool.map(lambda folder: sorted(_below(root, folder)), folders):
                inside += item
    except OSError as error:
        raise DataError(
            f"the folder cannot be read: {error.strerror}", where=error.filename or root
        ) from error
    entries, others = [], []
    for key in inside:
        path = os.path.join(root, key)
        if _is_image(key):
            folder = key.partition(os.sep)[0] if os.sep in key else ""
            entries.append(Entry(key, path, path, folder))
        else:
            others.append(path)
    return ImageListing(entries, folders, others)


def _below(root: str, folder: str) -> Iterator[str]:
    stack: list[tuple[str, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while stack:
        inside, above = stack.pop()
        place = os.path.join(root, inside)
        status = os.stat(place)
        here = (status.st_dev, status.st_ino)
        if here in above:
            continue  # a link to a folder that contains it
        with os.scandir(place) as entries:
            for entry in entries:
                if not _is_data(entry.name):
                    continue
                if entry.is_dir():
                    stack.append((os.path.join(inside, entry.name), above | {here}))
                else:
                    yield os.path.join(inside, entry.name)


def _elsewhere(url: str) -> ImageListing:
    files = find(url.rstrip("/") + "/**", unpack=False)
    fs, place = url_to_fs(url)
    root = str(fs.unstrip_protocol(place)).rstrip("/") + "/"
    entries, others, folders = [], [], set()
    for file in files:
        key = file.name.removeprefix(root)
        folder = key.partition("/")[0] if "/" in key else ""
        if not all(map(_is_data, key.split("/"))):
            continue
        if _is_image(key):
            entries.append(Entry(key, file.path, file.name, folder))
            folders.add(folder)
        else:
            others.append(file.name)
    return ImageListing(entries, sorted(folders - {""}), others)


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _is_data(name: str) -> bool:
    return not name.startswith(".") and name != _NO_CLASS


def _parent(name: str) -> str:
    if "://" in name:
        return PurePosixPath(name).parent.name
    return os.path.basename(os.path.dirname(os.path.abspath(name)))


def open_images(entries: list[Entry], policy: ErrorPolicy) -> tuple[list[Entry], npt.NDArray[Any]]:
    def read(first: int) -> list[Header | str]:
        return [_header_or_problem(entry) for entry in entries[first : first + _PIECE]]

    with Pool(_THREADS) as pool:
        headers = list(chain.from_iterable(pool.map(read, range(0, len(entries), _PIECE))))
    bad = [
        (header, entry)
        for header, entry in zip(headers, entries, strict=True)
        if isinstance(header, str)
    ]
    if bad and not policy.skip:
        what, entry = bad[0]
        if len(bad) > 1:
            what = f"{len(bad):,} of {len(entries):,} images cannot be read; the first: {what}"
        do = f'fix or remove it, or on_error="skip", max_errors={max(policy.max_errors, len(bad))}'
        raise DataError(what, where=short_name(entry.name), do=do)
    for what, entry in bad:
        policy.bad(what, short_name(entry.name))
    if len(bad) == len(entries):
        raise DataError(
            f"none of the images can be read; the first: {bad[0][0]}",
            where=short_name(entries[0].name),
        )
    kept = [
        entry for header, entry in zip(headers, entries, strict=True) if not isinstance(header, str)
    ]
    return kept, np.array([header for header in headers if not isinstance(header, str)], HEADER)


def _header_or_problem(entry: Entry) -> Header | str:
    try:
        return read_header(entry.path)
    except Damaged as error:
        return str(error)


def read_image(entry: Entry, header: Header) -> bytes:
    """Return the content of an image file, if it is still the file of this header."""
    data = _content(entry, header)
    if len(data) != header.bytes:
        size = "more" if len(data) > header.bytes else f"{len(data):,}"
        raise Damaged(
            f"the file has changed since it was opened: it had {header.bytes:,} bytes, now {size}"
        )
    if not is_of(header, data):
        raise Damaged("the file has changed since it was opened: it begins with other bytes")
    return data


def _content(entry: Entry, header: Header) -> bytes:
    try:
        # Python's file objects take three times as long as these calls.
        handle = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = os.read(handle, header.bytes + 1)
            # Some file systems return fewer bytes than requested.
            while len(data) < header.bytes and (more := os.read(handle, header.bytes)):
                data += more
        finally:
            os.close(handle)
    except OSError as error:
        raise Damaged(f"the file can no longer be read: {error.strerror}") from error
    return data


def short_name(name: str) -> str:
    """Return a path relative to the current folder, if it is below it."""
    if "://" in name:
        return name
    relative = os.path.relpath(name)
    return name if relative.startswith("..") else relative
