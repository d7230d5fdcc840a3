"""Public data sets: digits that need no download, and downloads of IDX files.

A file is downloaded under another name in its folder, compared with its published checksum, flushed
to disk and renamed. So it is complete and right, or absent. A file that is already there and right
is not downloaded again.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import interpolate

from flatout import unfinished
from flatout.atomic_file import atomic_write
from flatout.console import say_as_is
from flatout.data.sources.arrays.arrays import Arrays
from flatout.errors import DataError, as_data_error
from flatout.words import size_words

# Largest amount of ink in each of the 8x8 cells of load_digits, which counts from 0.
_MOST_INK = 16


def digits(size: int = 28, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Return (train, test): 1,797 handwritten digits from UCI's "Optical Recognition" data set.

    Images are enlarged from 8x8 by bilinear interpolation. The split is 80 to 20, with every digit
    in proportion.

    Args:
        size: height and width of the enlarged images, in pixels.
        seed: seed of the split.

    Returns:
        Two `Arrays` of 1,437 and 360 samples: images uint8 of shape (samples, 1, size, size), which
        become float32 from 0 to 1 batch by batch, and labels int64 of shape (samples,).
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    ink, labels = load_digits(return_X_y=True)
    small = torch.from_numpy(ink.reshape(-1, 1, 8, 8)).float()
    large = interpolate(small, size=(size, size), mode="bilinear", align_corners=False)
    images = (large * (255 / _MOST_INK)).round().to(torch.uint8)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=seed, stratify=labels
    )
    targets = torch.from_numpy(labels.astype(np.int64))
    first, second = (
        Arrays(images[rows], targets[rows], scale=1 / 255)
        for rows in map(torch.from_numpy, (train, test))
    )
    return first, second


# Seconds without a byte after which a download fails.
_TIMEOUT_S = 30.0
# Maximum number of bytes that are read at a time.
_PIECE = 1 << 20
# Seconds between two lines about the progress of a download.
_QUIET_S = 1.0


class _Location(NamedTuple):
    url: str
    files: dict[str, str]


# Locations of the data sets. Checksums of Fashion-MNIST are from its README; those of MNIST are of
# the files as first published.
_HOMES = {
    "fashion_mnist": _Location(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "mnist": _Location(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
}


def fetch(
    name: str,
    folder: str | os.PathLike[str],
    *,
    url: str | None = None,
    files: dict[str, str] | None = None,
    say: Callable[[str], None] = say_as_is,
) -> Path:
    """Download a data set into a folder; return the folder, for `flatout.data.idx_split`.

    Args:
        name: "fashion_mnist" or "mnist".
        folder: created if it does not exist.
        url: URL of a folder with the same files, such as a mirror.
        files: file names and their MD5 in hexadecimal, for a user's own data set; needs `url`.
        say: prints a line for each file, and more lines for slow downloads.

    Raises:
        DataError: the name is unknown; a file cannot be downloaded, differs from the published one,
            or cannot be written. Files that are already complete stay.
    """
    home = _home(name, url, files)
    target = Path(folder)
    with _writing(target):
        target.mkdir(parents=True, exist_ok=True)
    for file, digest in home.files.items():
        place = target / file
        with _writing(place):
            result = _digest(place) if place.exists() else None
        if result == digest:
            continue
        if result is not None:
            raise DataError(
                f"{file} is there and is another file than was published: expected MD5 {digest}, "
                f"found {result}",
                where=str(place),
                do="move it away, or choose another folder: nothing of yours is written over",
            )
        _fetch_one(f"{home.url.rstrip('/')}/{file}", place, digest, say)
    return target


def _home(name: str, url: str | None, files: dict[str, str] | None) -> _Location:
    if files is not None:
        if url is None:
            raise DataError(
                f"the files of {name!r} are named, but not where they lie", do="give url"
            )
        return _Location(url, files)
    if name not in _HOMES:
        raise DataError(
            f"unknown data set {name!r}; known: {', '.join(_HOMES)}",
            do="use one of these names, or give url and files",
        )
    return _HOMES[name] if url is None else _HOMES[name]._replace(url=url)


def _fetch_one(url: str, place: Path, digest: str, say: Callable[[str], None]) -> None:
    # Other processes may download into the same folder at the same time.
    unfinished.remove_abandoned(place.parent)
    with _writing(place), atomic_write(place, "wb", durable=True) as file:
        md5 = hashlib.md5(usedforsecurity=False)
        for piece in _pieces(url, say):
            md5.update(piece)
            file.write(piece)
        if (item := md5.hexdigest()) != digest:
            raise DataError(
                f"{place.name} is not the file that was published: expected MD5 {digest}, found "
                f"{item}",
                where=url,
                do="try again; if it stays so, the place holds another file: pass url= of a mirror",
            )


def _pieces(url: str, say: Callable[[str], None]) -> Iterator[bytes]:
    by_hand = "check the network, pass url= of a mirror, or put the file there by hand"
    got, reported = 0, time.monotonic()
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            size = answer.headers.get("Content-Length")
            wanted = None if size is None else int(size)
            say(f"fetching {url}" + ("" if wanted is None else f" ({size_words(wanted)})"))
            # `read1` returns the bytes that are there, so that a slow download shows progress.
            while piece := answer.read1(_PIECE):
                got += len(piece)
                yield piece
                if time.monotonic() - reported > _QUIET_S:
                    reported = time.monotonic()
                    whole = "" if wanted is None else f" of {size_words(wanted)}"
                    say(f"  {size_words(got)}{whole}")
    except urllib.error.HTTPError as error:
        raise DataError(
            f"expected a file, found {error.code} {error.reason}", where=url, do=by_hand
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"the download failed after {got:,} bytes: {reason}", where=url, do=by_hand
        ) from error
    if wanted is not None and got != wanted:
        raise DataError(
            f"the download ended early: expected {wanted:,} bytes, found {got:,}",
            where=url,
            do=by_hand,
        )


def _writing(path: Path) -> AbstractContextManager[None]:
    what, do = "the file cannot be read or written", "choose another folder, or make room"
    return as_data_error(what, str(path), do)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
