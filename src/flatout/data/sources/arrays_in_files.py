"""Arrays in files with a row for each sample: where they are, and what a schema makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from flatout.data.files import File
from flatout.data.schema import Column, Given, Role, Schema, as_schema
from flatout.errors import DataError

# One array, several by name, or several under names of one's own.
Names: TypeAlias = "str | Sequence[str] | Mapping[str, str]"

_DTYPES = {
    **{name: name for name in ("bool", "uint8", "int8", "int16", "int32", "int64")},
    **{name: name for name in ("float16", "float32", "float64")},
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
}


class MemberChecksum(NamedTuple):
    """CRC-32 of a member of a ZIP archive, with the start and end of its bytes in the file."""

    crc: int
    start: int
    stop: int


class StoredArray(NamedTuple):
    """Where an array lies.

    Attributes:
        file: that holds it.
        name: in that file; "" where the file holds one array.
        dtype: as it is stored.
        shape: rows first.
        offset: of its first byte in the file; None where it is packed or lies in pieces.
        fortran: whether the first index is the fastest.
        checksum: of the archive's member that holds the array; None outside of archives.
    """

    file: File
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int | None
    fortran: bool = False
    checksum: MemberChecksum | None = None

    @property
    def where(self) -> str:
        return f"{self.file.name}: {self.name}" if self.name else self.file.name


Part: TypeAlias = Mapping[str, StoredArray]


class ColumnRole(NamedTuple):
    """A column that a user names: its role, and what it is called in the file."""

    role: Role
    name: str


def wanted_columns(
    inputs: Names, targets: Names | None, weight: str | None
) -> dict[str, ColumnRole]:
    """The columns that a user names."""
    roles: dict[Role, Names] = {"input": inputs}
    if targets is not None:
        roles["target"] = targets
    if weight is not None:
        roles["weight"] = weight
    columns: dict[str, ColumnRole] = {}
    for role, names in roles.items():
        listed = [names] if isinstance(names, str) else names
        pairs = listed.items() if isinstance(listed, Mapping) else zip(listed, listed, strict=True)
        for column, name in pairs:
            if column in columns:
                raise DataError(f"{column!r} is named twice, the second time as {role}")
            columns[column] = ColumnRole(role, name)
    if not inputs:
        raise DataError("expected at least one input, found none")
    return columns


def schema_of(
    format: str, given: Given | None, roles: Mapping[str, Role], parts: Sequence[Part]
) -> Schema:
    """The schema of arrays, given or inferred; dtypes stay as they are stored.

    Unsigned integers of 16 and 32 bits become the next wider signed ones, those of 64 bits int64.
    """
    for part in parts:
        _check_rows(part)
    if given is None:
        schema = Schema(
            format=format,
            columns=tuple(_column(name, role, parts[0][name]) for name, role in roles.items()),
        )
    else:
        schema = as_schema(given, format)
        if {column.name for column in schema.columns} != set(roles):
            raise DataError(
                f"the schema has the columns {', '.join(c.name for c in schema.columns)}, "
                f"but the arrays are called {', '.join(roles)}"
            )
        schema = schema.with_roles(**roles)
    for part in parts:
        for column in schema.columns:
            _check_fits(part[column.name], column)
    return schema


def _check_rows(part: Part) -> None:
    first = next(iter(part.values()))
    for place in part.values():
        if not place.shape:
            raise DataError("expected a row for each sample, found one number", where=place.where)
        if 0 in place.shape[1:]:
            raise DataError(f"expected values, found shape {place.shape}", where=place.where)
        if place.shape[0] != first.shape[0]:
            raise DataError(
                f"expected {first.shape[0]:,} rows, as {first.where} has, found {place.shape[0]:,}",
                where=place.where,
            )


def _column(name: str, role: Role, place: StoredArray) -> Column:
    dtype: Any = _dtype_of(place)
    return Column(name=name, dtype=dtype, shape=place.shape[1:], role=role)


def _dtype_of(place: StoredArray) -> str:
    native = place.dtype.newbyteorder("=")
    if native.name in _DTYPES and native.names is None:
        return _DTYPES[native.name]
    if native.hasobject:
        words, do = "Python objects", "save it as an array of numbers: array.astype('float32')"
    elif native.names is not None:
        words, do = f"records with the fields {', '.join(native.names)}", "save one array a field"
    else:
        words, do = str(native), "save it as numbers, such as float32 or int64"
    raise DataError(f"expected an array of numbers, found {words}", where=place.where, do=do)


def _check_fits(place: StoredArray, column: Column) -> None:
    dtype = np.dtype(_dtype_of(place))
    wanted = column.numpy_dtype
    whole = wanted.kind in "iu" and dtype.kind in "iu"
    if place.shape[1:] != column.shape or column.ragged:
        raise DataError(
            f"expected rows of {column.words}, found shape {place.shape[1:]}", where=place.where
        )
    if not (dtype == wanted or whole or (wanted.kind == "f" and dtype.kind in "biuf")):
        raise DataError(f"expected {column.words}, found {dtype}", where=place.where)
    if column.role == "weight" and column.shape:
        raise DataError(
            f"weight: expected a number a row, found shape {column.shape}", where=place.where
        )


def convert(values: npt.NDArray[Any], out: npt.NDArray[Any], place: StoredArray) -> None:
    """Write values to an array of another dtype.

    Raises:
        DataError: a whole number is too large or too small for it.
    """
    if out.dtype.kind in "iu" and values.size:
        low, high = np.iinfo(out.dtype).min, np.iinfo(out.dtype).max
        least, most = int(values.min()), int(values.max())
        if least < low or most > high:
            raise DataError(
                f"expected {out.dtype}, found {least if least < low else most}", where=place.where
            )
    out[...] = values
