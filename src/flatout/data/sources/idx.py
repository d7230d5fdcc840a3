"""IDX files, the format of MNIST and Fashion-MNIST, packed by gzip or not.

The format (Y. LeCun's description of the MNIST files): two zero bytes, one byte for the dtype, one
for the number of dimensions, a big-endian 32-bit size per dimension, then the values, big-endian,
the last dimension fastest.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.files import most_unpacked
from flatout.data.sources.arrays import Arrays
from flatout.errors import DataError, as_data_error

_DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(">u1"),
    0x09: np.dtype(">i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_GZIP = b"\x1f\x8b"
# Deflate packs at most 1032 to 1, so a header that promises more is corrupt.
_MOST_PACKED = 1032
_CHUNK = 1 << 20
_PIXEL_SCALE = 1 / 255
_PREFIXES = {"train": "train", "test": "t10k"}


def read(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """The array in an IDX file, in native byte order; gzip is recognized by its first bytes."""
    file = Path(path)
    with as_data_error(f"cannot read {file}"), file.open("rb") as raw:
        file_size = os.fstat(raw.fileno()).st_size
        if raw.peek(2)[:2] != _GZIP:
            return _read(_Reader(raw, file), file_size)
        with gzip.GzipFile(fileobj=raw) as unpacked:
            return _read(_Reader(unpacked, file), file_size)


def write(path: str | os.PathLike[str], array: npt.ArrayLike) -> None:
    """Write an IDX file, packed by gzip (without a time) where the name ends in `.gz`.

    Raises:
        DataError: the format has no code for the dtype, or the array is a single number.
    """
    values = np.asarray(array)
    big_endian = values.dtype.newbyteorder(">")
    if big_endian not in _CODES:
        names = ", ".join(str(dtype.newbyteorder("=")) for dtype in _CODES)
        raise DataError(f"IDX has no code for dtype {values.dtype}: expected one of {names}")
    if values.ndim == 0:
        raise DataError("IDX holds arrays of at least 1 dimension, found a single number")
    header = struct.pack(f">HBB{values.ndim}I", 0, _CODES[big_endian], values.ndim, *values.shape)
    content = header + values.astype(big_endian).tobytes()
    if Path(path).suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    Path(path).write_bytes(content)


def idx(folder_or_files: str | os.PathLike[str] | tuple[Any, Any], split: str = "train") -> Arrays:
    """Images and labels from IDX files.

    Images stay uint8 in memory, of shape (samples, 1, height, width), and become float32 from 0 to
    1 batch by batch; labels are int64 of shape (samples,).

    Args:
        folder_or_files: a folder with the usual names (`train-images-idx3-ubyte`,
            `t10k-labels-idx1-ubyte`, ..., also `train-images.idx3-ubyte`, each with or without
            `.gz`), or the pair (images file, labels file).
        split: "train" or "test" (the files that start with `t10k`); ignored for a pair of files.

    Raises:
        DataError: a file is missing, damaged, or holds something else than images and labels.
    """
    if isinstance(folder_or_files, tuple):
        images, labels = map(Path, folder_or_files)
        return _images(_Pair(images, labels))
    if split not in _PREFIXES:
        raise DataError(f"split: expected 'train' or 'test', found {split!r}")
    folder = Path(folder_or_files)
    pair = _find(folder, split)
    if pair is not None:
        return _images(pair)
    other = "test" if split == "train" else "train"
    if _find(folder, other) is None:
        raise _no_pair(folder)
    raise DataError(
        f"no {split} pair: expected {_PREFIXES[split]}-images-idx3-ubyte and "
        f"{_PREFIXES[split]}-labels-idx1-ubyte, found only the {other} pair",
        where=str(folder),
        do="flatout.data.idx_split(folder) divides that pair",
    )


def idx_split(folder: str | os.PathLike[str], held_out: int = 2000) -> tuple[Arrays, Arrays]:
    """(train, test) from a folder of IDX files.

    Where both pairs are there, they are the answer. Where only one is, its last `held_out` samples
    are held out, in the order of the file.

    Raises:
        DataError: as `idx`, or `held_out` leaves nothing on one side.
    """
    folder = Path(folder)
    pairs = [pair for pair in (_find(folder, "train"), _find(folder, "test")) if pair is not None]
    if not pairs:
        raise _no_pair(folder)
    if len(pairs) == 2:
        return _images(pairs[0]), _images(pairs[1])
    whole = _images(pairs[0])
    if not 0 < held_out < len(whole):
        raise DataError(
            f"held_out: expected 1 to {len(whole) - 1:,} of {len(whole):,} samples, "
            f"found {held_out:,}",
            where=str(pairs[0].images),
        )
    kept = len(whole) - held_out
    return whole.part(0, kept), whole.part(kept, len(whole))


class _Pair(NamedTuple):
    images: Path
    labels: Path


class _Reader:
    """Reads a file to the byte, and says where it ended or broke."""

    def __init__(self, stream: io.BufferedReader | gzip.GzipFile, file: Path) -> None:
        self.packed = isinstance(stream, gzip.GzipFile)
        self.offset = 0
        self._stream = stream
        self._file = file

    def where(self, offset: int) -> str:
        unit = " of the unpacked data" if self.packed else ""
        return f"{self._file}, byte {offset:,}{unit}"

    def fill(self, target: memoryview, what: str) -> None:
        done = 0
        while done < len(target):
            try:
                piece = self._piece(min(_CHUNK, len(target) - done))
            except EOFError:
                piece = b""
            if not piece:
                raise DataError(
                    f"the file is truncated: expected {len(target):,} bytes of {what}, "
                    f"found {done:,}",
                    where=self.where(self.offset),
                )
            target[done : done + len(piece)] = piece
            done += len(piece)
            self.offset += len(piece)

    def expect_end(self) -> None:
        """Refuse what comes after the last value; in gzip this also checks the checksum."""
        try:
            more = self._piece(1)
        except EOFError as error:
            raise DataError(
                "the file is truncated: expected gzip's checksum and length, found the end",
                where=self.where(self.offset),
            ) from error
        if more:
            raise DataError(
                "the file is longer than its header says: expected the end, found more bytes",
                where=self.where(self.offset),
            )

    def _piece(self, most: int) -> bytes:
        try:
            # read1 hands out what was unpacked before an error, so that the offset is exact.
            return self._stream.read1(most)
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"the gzip data is corrupt: {error}", where=self.where(self.offset)
            ) from error


def _read(reader: _Reader, file_size: int) -> npt.NDArray[Any]:
    dtype, shape = _read_header(reader)
    expected = math.prod(shape) * dtype.itemsize
    room = file_size * _MOST_PACKED if reader.packed else file_size - reader.offset
    if expected > room:
        # Said before memory is asked for: a damaged size may promise petabytes.
        raise DataError(
            f"the file is truncated or its header damaged: expected {expected:,} bytes for "
            f"{dtype.newbyteorder('=')} of shape {shape}, found at most {room:,}",
            where=reader.where(reader.offset),
        )
    if reader.packed and expected > most_unpacked(file_size):
        raise DataError(
            f"the file unpacks to {expected:,} bytes, more than the ceiling of "
            f"{most_unpacked(file_size):,}",
            where=reader.where(reader.offset),
            do="if it is no mistake, unpack it by gunzip first",
        )
    try:
        array = np.empty(shape, dtype)
    except (ValueError, MemoryError) as error:
        raise DataError(
            f"no array can have shape {shape}: {error}", where=reader.where(4)
        ) from error
    if expected:
        reader.fill(array.reshape(-1).view(np.uint8).data, "values")
    reader.expect_end()
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_header(reader: _Reader) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = bytearray(4)
    reader.fill(memoryview(magic), "header")
    zeros, code, dimensions = struct.unpack(">HBB", magic)
    if zeros != 0 or code not in _DTYPES or dimensions == 0:
        raise DataError(
            "not an IDX file: expected two zero bytes, a dtype (08 09 0b 0c 0d 0e) and the number "
            f"of dimensions, found {magic.hex(' ')}",
            where=reader.where(0),
        )
    sizes = bytearray(4 * dimensions)
    reader.fill(memoryview(sizes), "header")
    return _DTYPES[code], struct.unpack(f">{dimensions}I", sizes)


def _find(folder: Path, split: str) -> _Pair | None:
    result = []
    for kind in ("images-idx3", "labels-idx1"):
        stem = f"{_PREFIXES[split]}-{kind}-ubyte"
        dotted = stem.replace("-idx", ".idx")
        names = (stem, dotted, f"{stem}.gz", f"{dotted}.gz")
        result.append(
            next((folder / name for name in names if os.path.isfile(folder / name)), None)
        )
    images, labels = result
    return None if images is None or labels is None else _Pair(images, labels)


def _no_pair(folder: Path) -> DataError:
    if not os.path.isdir(folder):
        return DataError(f"expected a folder of IDX files, found no folder {folder}")
    return DataError(
        "no pair of IDX files: expected train-images-idx3-ubyte and train-labels-idx1-ubyte (or "
        "t10k-...), with or without .gz",
        where=str(folder),
        do="name the files: flatout.data.idx((images, labels))",
    )


def _images(pair: _Pair) -> Arrays:
    images, labels = read(pair.images), read(pair.labels)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise DataError(
            "expected uint8 images of 3 dimensions (samples, height, width), found "
            f"{images.dtype} of {images.ndim}",
            where=str(pair.images),
        )
    if labels.ndim != 1 or labels.dtype.kind not in "ui":
        raise DataError(
            f"expected integer labels of 1 dimension, found {labels.dtype} of {labels.ndim}",
            where=str(pair.labels),
        )
    if len(images) != len(labels):
        raise DataError(
            f"images and labels differ in length: {len(images):,} and {len(labels):,}",
            where=f"{pair.images} and {pair.labels}",
        )
    return Arrays(
        torch.from_numpy(images).unsqueeze(1),
        torch.from_numpy(labels.astype(np.int64)),
        scale=_PIXEL_SCALE,
    )
