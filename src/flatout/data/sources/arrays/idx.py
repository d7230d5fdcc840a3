"""IDX files, the format of MNIST and Fashion-MNIST, compressed by gzip or not.

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

from flatout.data.reading.files import most_unpacked
from flatout.data.sources.arrays.arrays import Arrays
from flatout.errors import DataError, as_data_error

# dtype by its code in the third byte of a file.
_DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(">u1"),
    0x09: np.dtype(">i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
# First bytes of a gzip file.
_GZIP = b"\x1f\x8b"
# Bytes that are decompressed at a time.
_CHUNK = 1 << 20
_PIXEL_SCALE = 1 / 255
_PREFIXES = {"train": "train", "test": "t10k"}


def read(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """Read the array of an IDX file, in native byte order; gzip is detected by its first bytes."""
    file = Path(path)
    with as_data_error(f"cannot read {file}"):
        content = file.read_bytes()
    unit = ""
    if content.startswith(_GZIP):
        content, unit = _unpacked(content, file), " of the unpacked data"

    def failure(what: str, byte: int) -> DataError:
        return DataError(what, where=f"{file}, byte {byte:,}{unit}")

    zeros, code, dimensions = struct.unpack(">HBB", content[:4].ljust(4, b"\xff"))
    if zeros != 0 or code not in _DTYPES or dimensions == 0:
        raise failure(
            "not an IDX file: expected two zero bytes, a dtype (08 09 0b 0c 0d 0e) and the number "
            f"of dimensions, found {content[:4].hex(' ')}",
            0,
        )
    begin = 4 + 4 * dimensions
    if len(content) < begin:
        raise failure(f"the file is truncated: expected {begin:,} bytes of header", len(content))
    shape, dtype = struct.unpack(f">{dimensions}I", content[4:begin]), _DTYPES[code]
    size, found = math.prod(shape) * dtype.itemsize, len(content) - begin
    if found < size:
        raise failure(
            f"the file is truncated or its header damaged: expected {size:,} bytes for "
            f"{dtype.newbyteorder('=')} of shape {shape}, found {found:,}",
            len(content),
        )
    if found > size:
        raise failure(
            "the file is longer than its header says: expected the end, found more bytes",
            begin + size,
        )
    try:
        array = np.frombuffer(content, dtype, offset=begin).reshape(shape)
    except ValueError as error:
        raise failure(f"no array can have shape {shape}: {error}", 4) from error
    return array.astype(dtype.newbyteorder("="))


def _unpacked(packed: bytes, file: Path) -> bytes:
    content, most = bytearray(), most_unpacked(len(packed))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
            # read1 returns the bytes before an error, so that the position of the error is exact.
            while piece := stream.read1(_CHUNK):
                content += piece
                if len(content) > most:
                    raise DataError(
                        f"the file unpacks to more than the ceiling of {most:,} bytes",
                        where=str(file),
                        do="if it is no mistake, unpack it by gunzip first",
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        truncated = isinstance(error, EOFError)
        raise DataError(
            "the file is truncated: expected more of the gzip data, found the end"
            if truncated
            else f"the gzip data is corrupt: {error}",
            where=f"{file}, byte {len(content):,} of the unpacked data",
        ) from error
    return bytes(content)


def idx(folder_or_files: str | os.PathLike[str] | tuple[Any, Any], split: str = "train") -> Arrays:
    """Read images and labels from IDX files.

    Images stay uint8 in memory, of shape (samples, 1, height, width), and become float32 from 0 to
    1 batch by batch; labels are int64 of shape (samples,).

    Args:
        folder_or_files: a folder with the usual names (`train-images-idx3-ubyte`,
            `t10k-labels-idx1-ubyte`, ..., also `train-images.idx3-ubyte`, each with or without
            `.gz`), or the pair (images file, labels file).
        split: "train" or "test" (the files that start with `t10k`); ignored for a pair of files.

    Raises:
        DataError: a file is missing or damaged, or does not hold images and labels.
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
    """Return (train, test) from a folder of IDX files.

    If the folder has both pairs of files, these are returned. If it has only one pair, the last
    `held_out` samples are held out, in the order of the file.

    Raises:
        DataError: see `idx`; or `held_out` leaves a part without samples.
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
