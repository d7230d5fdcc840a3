"""Writes checksums beside files: what `flatout data seal` does."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.data import formats
from flatout.data.files import Paths, find
from flatout.data.sealed import Sealed, has_seal, write_seal
from flatout.errors import DataError, as_data_error

# What compares seals: arrays in files, and rows in lines or records.
KINDS = ("npy", "npz", "hdf5", "libsvm", "csv", "criteo", "tfrecord")

_OF_THEIR_OWN = {
    "rows": "the folder's bytes are compared with its checksums as they are read",
    "tfrecord": "each record is compared with its checksum as it is read",
    "parquet": "pages that have a checksum are compared with it as they are read; others are not",
}


def compared_words(kind: str, paths: Sequence[str]) -> str:
    """Whether a changed byte would be noticed, in words."""
    without = [path for path in paths if not has_seal(path)]
    if not without:
        return "the bytes are compared with their seals as they are read"
    if kind in _OF_THEIR_OWN:
        return _OF_THEIR_OWN[kind]
    count = (
        "the bytes" if len(without) == len(paths) else f"{len(without):,} of {len(paths):,} files"
    )
    do = ": flatout data seal writes checksums" if kind in KINDS else ""
    return f"{count} are compared with no checksums, so a change would not be noticed{do}"


def seal(paths: Paths, *, format: str | None = None) -> list[Sealed]:
    """Write a CRC-32C of each 256 KiB of files beside them, into FILE.seal.

    Whatever reads the files afterwards compares each block when it is first read in a run. Seal
    a file again when it was changed.

    Args:
        paths: as `files.find` takes them, on this machine.
        format: one of `formats.FORMATS`; None guesses.

    Raises:
        DataError: there is no such file, its format compares no seals, it is packed or elsewhere,
            or the seal cannot be written.
    """
    kind = format or formats.guess(paths)
    if kind not in KINDS:
        raise DataError(
            f"files of {kind} are not compared with seals; {', '.join(KINDS)} are",
            do="rows and Parquet hold their own checksums",
        )
    files = find(paths, unpack=False)
    for file, unpacked in zip(files, find(paths), strict=True):
        if file.path != unpacked.path or "://" in file.name:
            raise DataError(
                "what is packed or lies elsewhere is copied into the cache, and sealed there",
                where=file.name,
                do="seal files of this machine that are not packed",
            )
    done = []
    for file in files:
        with as_data_error("the seal cannot be written", file.name):
            done.append(write_seal(file.path, file.name))
    return done
