"""Arrays in files of numpy (npy, npz). Nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.pipeline import Pipeline
from flatout.data.reading.files import File, Paths, find
from flatout.data.sources.arrays.arrays import Arrays
from flatout.errors import DataError

# Name of an array in a file, a list of names, or a dict that maps input names to array names.
Names: TypeAlias = "str | Sequence[str] | Mapping[str, str]"
# Signed dtype that replaces an unsigned dtype.
_SIGNED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
# Maximum number of names in a message.
_TOLD = 20


def npy(
    inputs: Paths | Mapping[str, Paths],
    targets: Paths | Mapping[str, Paths] | None = None,
    weight: Paths | None = None,
) -> Pipeline:
    """Read rows of arrays in npy files. One file is mapped into memory; several files are joined.

    Dtypes stay as they are stored, in the byte order of this machine; unsigned integers of more
    than 8 bits become signed ones.

    Args:
        inputs: path, glob pattern or URL of an npy file, or a list of these; several files hold the
            rows of one array in sequence. For several inputs, a dict of such paths by name.
        targets: paths, or a dict of paths by name, as for `inputs`; None without targets.
        weight: paths of an array with one weight for each row.

    Raises:
        DataError: a file is damaged, truncated or holds no numbers (the error names the file), or
            the arrays have different numbers of rows.
    """
    return _pipeline(inputs, targets, weight, lambda paths: _joined(find(paths), _read_npy))


def npz(
    paths: Paths,
    inputs: Names = "x",
    targets: Names | None = "y",
    weight: str | None = None,
) -> Pipeline:
    """Read rows of arrays in npz archives into memory; dtypes are as for `npy`.

    Args:
        paths: path, glob pattern or URL, or a list of these; several archives follow each other,
            row after row.
        inputs: name of an array in the archive, a list of names, or a dict that maps the model's
            input names to array names.
        targets: name, list or dict of names, as for `inputs`; None without targets.
        weight: name of an array with one weight for each row.

    Raises:
        DataError: an archive lacks an array, or `npy` would raise this error for its arrays.
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
    """Return the dtype that rows of an array or dataset get; refuse arrays without numbers."""
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
    except Exception as error:  # the libraries raise errors of any type for damaged files
        raise DataError(f"{what}: {error}", where=where) from error
