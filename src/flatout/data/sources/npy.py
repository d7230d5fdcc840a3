"""Arrays that numpy has saved: npy files, and npz archives of them.

The format is numpy's own (NEP 1): magic, version, a header with dtype, order and shape, the values.
Nothing is ever unpickled.
"""

from __future__ import annotations

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from flatout.data.files import File, Paths, find, most_unpacked
from flatout.data.pipeline import Pipeline
from flatout.data.schema import Given, Role
from flatout.data.sources.arrays_in_files import (
    MemberChecksum,
    Names,
    StoredArray,
    schema_of,
    wanted_columns,
)
from flatout.data.sources.mapped import MappedRows
from flatout.errors import DataError, as_data_error

_read_header_2 = np.lib.format.read_array_header_2_0
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def npy(
    inputs: Paths | Mapping[str, Paths],
    targets: Paths | Mapping[str, Paths] | None = None,
    weight: Paths | None = None,
    *,
    schema: Given | None = None,
) -> Pipeline:
    """Rows of arrays in npy files, mapped into memory and read in any order.

    Dtypes stay as they are stored, in the byte order of this machine; unsigned integers of more
    than 8 bits become signed ones.

    Args:
        inputs: as `files.find` takes paths; several files are parts of one array, row after row.
            Several inputs come as a dict of these by name.
        targets: as `inputs`, with as many files of as many rows; None where there is no target.
        weight: as `inputs`, a number a row.
        schema: a Schema, the path of one in TOML, or a dict, for other dtypes; its columns are
            "inputs", "targets" and "weight", or the names of the dicts.

    Raises:
        DataError: naming a file that is damaged, cut off, holds no numbers, or has another number
            of rows than its neighbor.
    """
    return Pipeline(npy_rows(inputs, targets, weight, schema))


def npz(
    paths: Paths,
    inputs: Names = "x",
    targets: Names | None = "y",
    weight: str | None = None,
    *,
    schema: Given | None = None,
    most: int | None = None,
) -> Pipeline:
    """Rows of arrays in npz archives, mapped into memory, or held there where they are packed.

    Args:
        paths: as `files.find` takes them; several archives follow each other, row after row.
        inputs: an array's name in the archive, or a list of them, or a dict of them by the names
            that they are to have.
        targets: as `inputs`; None where there is no target.
        weight: the name of an array with a number a row.
        schema: as for `npy`; its columns are those names.
        most: bytes that a packed array may unpack to; None means 200 times its packed size, and
            256 MiB in any case.

    Raises:
        DataError: as `npy`, or an archive lacks an array, or one unpacks to more than `most`.
    """
    return Pipeline(npz_rows(paths, inputs, targets, weight, schema, most))


def npy_rows(
    inputs: Paths | Mapping[str, Paths],
    targets: Paths | Mapping[str, Paths] | None = None,
    weight: Paths | None = None,
    schema: Given | None = None,
) -> MappedRows:
    """The rows that `npy` reads."""
    given: dict[Role, Any] = {"input": inputs, "target": targets, "weight": weight}
    usual = {"input": "inputs", "target": "targets", "weight": "weight"}
    roles: dict[str, Role] = {}
    places: dict[str, list[StoredArray]] = {}
    for role, paths in given.items():
        if paths is None:
            continue
        named = paths if isinstance(paths, Mapping) else {usual[role]: paths}
        for name, own in named.items():
            if name in roles:
                raise DataError(f"{name!r} is named twice, the second time as {role}")
            roles[name] = role
            places[name] = [_npy_place(file) for file in find(own)]
    counts = {name: len(place) for name, place in places.items()}
    if len(set(counts.values())) != 1:
        words = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(f"expected as many files of each, found {words or 'none'}")
    parts = [dict(zip(places, own, strict=True)) for own in zip(*places.values(), strict=True)]
    return MappedRows("npy", parts, schema_of("npy", schema, roles, parts), _unpacked)


def npz_rows(
    paths: Paths,
    inputs: Names = "x",
    targets: Names | None = "y",
    weight: str | None = None,
    schema: Given | None = None,
    most: int | None = None,
) -> MappedRows:
    """The rows that `npz` reads."""
    wanted = wanted_columns(inputs, targets, weight)
    # An archive is one file with places in it; what packs its members is its own business.
    parts = [
        {column: _npz_place(file, value.name, most) for column, value in wanted.items()}
        for file in find(paths)
    ]
    roles = {column: value.role for column, value in wanted.items()}
    return MappedRows("npz", parts, schema_of("npz", schema, roles, parts), _unpacked)


def _npy_place(file: File) -> StoredArray:
    with as_data_error("the file cannot be read", file.name), open(file.path, "rb") as stream:
        if stream.read(4) == b"PK\x03\x04":
            raise DataError(
                "expected one array, found an archive",
                where=file.name,
                do="read it with flatout.data.npz",
            )
        stream.seek(0)
        return _place(stream, file, "", file.size)


def _npz_place(file: File, name: str, most: int | None) -> StoredArray:
    try:
        with zipfile.ZipFile(file.path) as archive, open(file.path, "rb") as stream:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if name not in names:
                raise DataError(
                    f"expected an array {name!r}, found {', '.join(names) or 'none'}",
                    where=file.name,
                    do="name them: inputs=..., targets=... (None where there is no target)",
                )
            member = archive.infolist()[names.index(name)]
            if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
                stream.seek(member.header_offset)
                signature, *lengths = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
                if signature != b"PK\x03\x04":
                    raise DataError("the archive is damaged", where=f"{file.name}: {name}")
                start = stream.seek(sum(lengths), 1)
                checksum = MemberChecksum(member.CRC, start, start + member.file_size)
                place = _place(stream, file, name, member.file_size)
                return place._replace(checksum=checksum)
            ceiling = most_unpacked(member.compress_size) if most is None else most
            if member.file_size > ceiling:
                raise DataError(
                    f"the array unpacks to {member.file_size:,} bytes, more than the ceiling of "
                    f"{ceiling:,}",
                    where=f"{file.name}: {name}",
                    do=f"if it is no mistake: flatout.data.npz(..., most={member.file_size})",
                )
            with archive.open(member) as packed:
                return _place(packed, file, name, member.file_size)._replace(offset=None)
    except (OSError, zipfile.BadZipFile, struct.error, RuntimeError, NotImplementedError) as error:
        raise DataError(
            f"the file is damaged, cut off or no npz archive: {error}", where=file.name
        ) from error


def _place(stream: IO[bytes], file: File, name: str, size: int) -> StoredArray:
    where = f"{file.name}: {name}" if name else file.name
    start = stream.tell()
    try:
        # Version 3 is for records with names beyond Latin-1, and those are refused in any version.
        is_first = np.lib.format.read_magic(stream) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if is_first else _read_header_2
        shape, fortran, dtype = read(stream)
    except OSError:
        raise
    except Exception as error:  # numpy's parser raises whatever the damage leads to
        raise DataError(
            f"the file is empty, damaged or no npy file: {error}", where=where
        ) from error
    header = stream.tell() - start
    actual = size - header
    expected = actual if dtype.hasobject else math.prod(shape) * dtype.itemsize
    if expected != actual or min(shape, default=0) < 0:
        problem = "cut off" if actual < expected else "longer than its header says"
        raise DataError(
            f"the file is damaged or {problem}: expected {expected:,} bytes for {dtype} of shape "
            f"{shape}, found {actual:,}",
            where=where,
        )
    return StoredArray(file, name, dtype, shape, start + header, bool(fortran))


def _unpacked(place: StoredArray) -> npt.NDArray[Any]:
    place.file.check_unchanged()
    try:
        with zipfile.ZipFile(place.file.path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            member = archive.infolist()[names.index(place.name)]
            with archive.open(member) as packed:
                array: npt.NDArray[Any] = np.lib.format.read_array(packed, allow_pickle=False)
                return array
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"the array cannot be unpacked: {error}", where=place.where) from error
