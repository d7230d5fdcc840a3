"""Arrays in files of numpy (npy, npz). Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.files import File, Paths, find
from flatout.data.pipeline import Pipeline
from flatout.data.sources.arrays import Arrays
from flatout.errors import DataError

# One array of a file, several by name, or several under names of one's own.
Names: TypeAlias = "str | Sequence[str] | Mapping[str, str]"
_SIGNED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
# Maximum number of names in a message.
_TOLD = 20


def npy(
    inputs: Paths | Mapping[str, Paths],
    targets: Paths | Mapping[str, Paths] | None = None,
    weight: Paths | None = None,
) -> Pipeline:
    """Rows of arrays in npy files; one file is mapped into memory, several are joined there.

    Dtypes stay as they are stored, in the byte order of this machine; unsigned integers of more
    than 8 bits become signed ones.

    Args:
        inputs: as `files.find` takes paths; several files are parts of one array, row after row.
            Several inputs come as a dict of these by name.
        targets: as `inputs`; None where there is no target.
        weight: as `inputs`, a number a row.

    Raises:
        DataError: naming a file that is damaged, cut off or holds no numbers; or the arrays differ
            in their number of rows.
    """
    return _pipeline(inputs, targets, weight, lambda paths: _joined(find(paths), _read_npy))


def npz(
    paths: Paths,
    inputs: Names = "x",
    targets: Names | None = "y",
    weight: str | None = None,
) -> Pipeline:
    """Rows of arrays in npz archives, held in memory; dtypes are those of `npy`.

    Args:
        paths: path, glob pattern or URL, or a list of these; several archives follow each other,
            row after row.
        inputs: an array's name in the archive, or a list of them, or a dict of them by the names
            that they are to have.
        targets: as `inputs`; None where there is no target.
        weight: the name of an array with a number a row.

    Raises:
        DataError: as `npy`, or an archive lacks an array.
    """
    files = find(paths)
    return _pipeline(
        _named(inputs), _named(targets), weight, lambda n: _joined(files, _read_npz, n)
    )


def _pipeline(inputs: Any, targets: Any, weight: Any, read: Callable[[Any], Any]) -> Pipeline:
    parts = [
        {name: read(one) for name, one in part.items()}
        if isinstance(part, Mapping)
        else None
        if part is None
        else read(part)
        for part in (inputs, targets, weight)
    ]
    return Pipeline(Arrays(*parts))


def _named(names: Names | None) -> str | Mapping[str, str] | None:
    if names is None or isinstance(names, (str, Mapping)):
        return names
    return {name: name for name in names}


def _joined(
    files: Sequence[File], read: Callable[..., npt.NDArray[Any]], *name: str
) -> npt.NDArray[Any]:
    parts = [_numbers(read(file, *name), ": ".join([file.name, *name])) for file in files]
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        if (part.dtype, part.shape[1:]) != (first.dtype, first.shape[1:]):
            raise DataError(
                f"expected rows of {first.dtype} of shape {first.shape[1:]}, as in "
                f"{files[0].name}, found {part.dtype} of shape {part.shape[1:]}",
                where=": ".join([file.name, *name]),
            )
    return first if len(parts) == 1 else np.concatenate(parts)


def _numbers(array: npt.NDArray[Any], where: str) -> npt.NDArray[Any]:
    return array.astype(dtype_of_rows(array, where), copy=False)


def dtype_of_rows(array: Any, where: str) -> np.dtype[Any]:
    """Return the dtype that rows of an array or a dataset get; refuse what holds no numbers."""
    if not array.shape:
        raise DataError("expected a row for each sample, found one number", where=where)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"expected an array of numbers, found {array.dtype}",
            where=where,
            do="save it as numbers, such as float32 or int64",
        )
    native: np.dtype[Any] = array.dtype.newbyteorder("=")
    return np.dtype(_SIGNED.get(native.name, native))


def _read_npy(file: File) -> npt.NDArray[Any]:
    with damage_named(file.name, "the file is empty, damaged, cut off or no npy file"):
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            raise DataError(
                "expected one array, found an archive",
                where=file.name,
                do="read it with flatout.data.npz",
            )
        if array.offset + array.nbytes != file.size:
            raise ValueError(f"expected {array.offset + array.nbytes:,} bytes, found {file.size:,}")
        return array


def _read_npz(file: File, name: str) -> npt.NDArray[Any]:
    where = f"{file.name}: {name}"
    with (
        damage_named(where, "the file is damaged, cut off or no npz archive"),
        np.load(file.path, allow_pickle=False) as archive,
    ):
        if name not in archive.files:
            raise absent("an array", name, archive.files, file)
        array: npt.NDArray[Any] = archive[name]
        return array


def absent(kind: str, name: str, names: Sequence[str], file: File) -> DataError:
    more = ", ..." if len(names) > _TOLD else ""
    return DataError(
        f"expected {kind} {name!r}, found {', '.join(names[:_TOLD]) or 'none'}{more}",
        where=file.name,
        do="name them: inputs=..., targets=... (None where there is no target)",
    )


@contextmanager
def damage_named(where: str, what: str) -> Iterator[None]:
    try:
        yield
    except (DataError, MemoryError):
        raise
    except Exception as error:  # the libraries raise whatever the damage leads to
        raise DataError(f"{what}: {error}", where=where) from error
