"""Schemas of Arrow tables: dtype, shape and role of each column.

Without a schema, Arrow's types become these dtypes: integers, bool, float16 and float32 stay
(unsigned integers of 16 and 32 bits become the next wider signed type, uint64 becomes int64);
float64 and decimals become float32; integer targets become int64. Dates become days since
1970-01-01, as float32, and times of the day become fractions of a day. Lists become ragged columns.
Lists of a fixed size and fixed-shape tensors become columns with a shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from flatout.data.reading.schema import Column, Given, Role, Schema, as_schema
from flatout.errors import DataError

Names: TypeAlias = "str | Sequence[str] | None"
Defaults: TypeAlias = "int | float | Mapping[str, int | float] | None"
# Names of columns whose categories are learned; or the categories of each column, by name, with
# None if they are learned.
Categories: TypeAlias = "str | Sequence[str] | Mapping[str, Sequence[Any] | None] | None"
# Names of columns of dates; or the strptime format of each column, by name.
Dates: TypeAlias = "str | Sequence[str] | Mapping[str, str] | None"

# Formats of dates that are used if the user names none.
ISO, ISO_WITH_ZONE, TIME = "ISO 8601", "ISO 8601 with zone", "ISO 8601 time"
ISO_TYPES = {
    ISO: pa.timestamp("us"),
    ISO_WITH_ZONE: pa.timestamp("us", "UTC"),
    TIME: pa.time64("us"),
}

# Name of the one input into which several columns are stacked.
STACKED = "inputs"
# _TOLD: maximum number of columns that a message names. _LONGEST: maximum number of characters of a
# column's name.
_TOLD, _LONGEST = 8, 40
_DTYPES = {
    "bool": "bool",
    "uint8": "uint8",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "halffloat": "float16",
    "float": "float32",
    "double": "float32",
}


def listed(names: Names) -> list[str]:
    """Return names as a list, where one name, several names or None are given."""
    return [names] if isinstance(names, str) else list(names or ())


@dataclass(frozen=True)
class ColumnOptions:
    """A user's settings about columns, in addition to a schema or instead of one.

    Attributes:
        target: names of targets.
        inputs: names of inputs; None means all columns without another role.
        weight: name of the column with the weights of samples.
        unused: names of columns to leave out.
        default: value that replaces a missing value, in all columns or by name; with None, a
            missing value is an error.
        categories: values of a column in the order of their numbers, by the column's name. They are
            learned for a column that has None instead, or whose name alone is given.
        stack: whether all numeric input columns become one input.
        dates: formats of columns of dates, by name; or the names of the columns.
        unknown: columns whose categories are numbered from 1, with 0 for any other value.
        left_out: columns of text that are left out, since they hold no categories.
        numberish: columns of `left_out` whose texts look like numbers or dates.
        leave_out: whether columns of text without categories are left out instead of refused.
    """

    target: Names = None
    inputs: Names = None
    weight: str | None = None
    unused: Names = None
    default: Defaults = None
    categories: Categories = None
    stack: bool = False
    dates: Dates = None
    unknown: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    numberish: tuple[str, ...] = ()
    leave_out: bool = False

    def fixed_categories(self, known: Iterable[str]) -> dict[str, list[Any]]:
        if not isinstance(self.categories, Mapping):
            return {}
        _check_names("categories", self.categories, known)
        given = self.categories.items()
        return {name: _values(name, values) for name, values in given if values is not None}

    def asked_categories(self, known: Iterable[str]) -> list[str]:
        """Return the columns whose categories are to be learned, even if they look like prose."""
        asked = self.categories
        if isinstance(asked, Mapping):
            return [name for name, values in asked.items() if values is None]
        _check_names("categories", listed(asked), known)
        return listed(asked)

    def date_formats(self, known: Iterable[str]) -> dict[str, str]:
        if isinstance(self.dates, Mapping):
            formats = dict(self.dates)
        else:
            formats = dict.fromkeys(listed(self.dates), ISO)
        _check_names("dates", formats, known)
        return formats

    def with_dates(self, formats: Mapping[str, str]) -> ColumnOptions:
        return replace(self, dates=dict(formats))

    def without(self, names: Iterable[str]) -> ColumnOptions:
        """Return the options with these columns also unused, unless they are named in a role."""
        roles = (self.target, self.inputs, self.weight, self.unused)
        named = {name for role in roles for name in listed(role)}
        more = [name for name in names if name not in named]
        return replace(self, unused=[*listed(self.unused), *more])

    def roles(self, before: Mapping[str, Role]) -> dict[str, Role]:
        """Return the new roles of columns, given their roles before."""
        given: dict[Role, list[str]] = {"unused": listed(self.unused)}
        named: dict[Role, Names] = {
            "input": self.inputs,
            "target": self.target,
            "weight": self.weight,
        }
        roles = dict(before)
        for role, names in named.items():
            if names is not None:
                given[role] = listed(names)
                # A user who names columns of a role names all of them.
                roles = {name: "unused" if had == role else had for name, had in roles.items()}
        named_so_far: set[str] = set()
        for role, own in given.items():
            for name in own:
                if name not in before:
                    known = ", ".join(before)
                    raise DataError(f"no column {name!r}: the columns are {known}")
                if name in named_so_far:
                    raise DataError(f"column {name!r} is named twice, the second time as {role}")
                named_so_far.add(name)
                roles[name] = role
        return roles


class _Kind(NamedTuple):
    """Contents of an Arrow type: numpy's dtype of the values, or None, and the shape of a row."""

    dtype: str | None
    shape: tuple[int, ...] = ()
    ragged: bool = False


def infer_schema(
    format: str,
    fields: Mapping[str, pa.DataType],
    wanted: ColumnOptions,
    options: Mapping[str, Any],
) -> Schema:
    if not fields or "" in fields:
        raise DataError("expected columns with names, found one without, or no columns")
    roles = wanted.roles(dict.fromkeys(fields, "input"))
    categories = wanted.fixed_categories(fields)
    dates = wanted.date_formats(fields)
    if isinstance(wanted.default, Mapping):
        _check_names("default", wanted.default, fields)
    columns, problems, left_out = [], [], list(wanted.left_out)
    for name, type in fields.items():
        column = _column(name, type, roles[name], wanted, categories, dates)
        if column is not None:
            columns.append(column)
        elif roles[name] != "unused":
            problems.append((name, type))
        elif is_text(type) and name not in left_out:
            left_out.append(name)
    if wanted.leave_out and columns:
        left_out += [name for name, _ in problems]
        problems = []
    if problems or not columns:
        raise _no_numbers(problems or list(fields.items()))
    result = {"categories": categories, "unknown": list(wanted.unknown), "dates": dates}
    result["left_out"] = left_out
    kept = {**options, **{name: value for name, value in result.items() if value}}
    if wanted.stack:
        columns, kept["stack"] = _stacked(columns, wanted, categories)
        if isinstance(wanted.default, Mapping):
            kept["defaults"] = {n: wanted.default[n] for n in kept["stack"] if n in wanted.default}
    return Schema(format=format, columns=tuple(columns), options=kept)


def _check_names(what: str, named: Iterable[str], fields: Iterable[str]) -> None:
    for name in named:
        if name not in fields:
            raise DataError(f"{what}: no column {name!r}: the columns are {', '.join(fields)}")


def _column(
    name: str,
    type: pa.DataType,
    role: Role,
    wanted: ColumnOptions,
    categories: Mapping[str, Any],
    dates: Mapping[str, str],
) -> Column | None:
    kind = _kind(type)
    default: Any = wanted.default
    if isinstance(default, Mapping):
        default = default.get(name)
    elif name in categories:
        default = None  # a default replaces missing numbers, and is no category
    if name in categories:
        dtype: Any = "int64"
    elif name in dates:
        dtype = "float32"
    elif kind.dtype is None:
        return None
    else:
        whole = kind.dtype.startswith(("int", "uint"))
        dtype = "int64" if whole and role == "target" else kind.dtype
    return Column(
        name=name, dtype=dtype, shape=kind.shape, ragged=kind.ragged, role=role, default=default
    )


def _values(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise DataError(f"categories of column {name!r}: expected a list, found {values!r}")
    return list(values)


def _stacked(
    columns: list[Column], wanted: ColumnOptions, categories: Mapping[str, Any]
) -> tuple[list[Column], list[str]]:
    names = [
        column.name
        for column in columns
        if column.role == "input"
        and not column.ragged
        and not column.shape
        and column.name not in categories
    ]
    if not names:
        raise DataError("stack: expected at least one numeric input column, found none")
    if STACKED in {column.name for column in columns} - set(names):
        raise DataError(
            f"stack makes a column {STACKED!r}, but the table has one of that name, which is no "
            "numeric input"
        )
    default = None if isinstance(wanted.default, Mapping) else wanted.default
    whole = Column(name=STACKED, dtype="float32", shape=(len(names),), default=default)
    return [whole, *(column for column in columns if column.name not in names)], names


def _no_numbers(problems: Sequence[tuple[str, pa.DataType]]) -> DataError:
    words = ", ".join(
        f"{_short(name)!r} ({'missing values alone' if pa.types.is_null(type) else type})"
        for name, type in problems[:_TOLD]
    ) + (f" and {len(problems) - _TOLD} more" if len(problems) > _TOLD else "")
    names = [_short(name) for name, _ in problems[:_TOLD]]
    first = names[0]
    return DataError(
        f"expected columns of numbers, found {words}",
        do=f"leave out what is no input: unused={names!r}; or give strings a number each: "
        f'categories={{{first!r}: ["a", "b", ...]}}',
    )


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def _kind(type: pa.DataType) -> _Kind:
    ragged = False
    shape: tuple[int, ...] = ()
    if isinstance(type, pa.FixedShapeTensorType):
        if type.permutation is not None and list(type.permutation) != sorted(type.permutation):
            return _Kind(None)
        shape, type = tuple(type.shape), type.value_type
    elif pa.types.is_list(type) or pa.types.is_large_list(type):
        ragged, type = True, type.value_type
    else:
        while pa.types.is_fixed_size_list(type):
            shape, type = (*shape, type.list_size), type.value_type
    if pa.types.is_dictionary(type):
        type = type.value_type
    if 0 in shape:
        return _Kind(None)
    if pa.types.is_decimal(type) or is_date(type):
        return _Kind("float32", shape, ragged)
    return _Kind(_DTYPES.get(str(type)), shape, ragged)


def is_date(type: pa.DataType) -> bool:
    """Return whether a type holds dates or times, which become days."""
    return bool(pa.types.is_date(type) or pa.types.is_timestamp(type) or pa.types.is_time(type))


def is_text(type: pa.DataType) -> bool:
    if pa.types.is_dictionary(type):
        type = type.value_type
    return bool(
        pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type)
    )


def given_schema(
    given: Given,
    format: str,
    wanted: ColumnOptions,
    options: Mapping[str, Any],
    also: Sequence[str] = (),
) -> Schema:
    """Return a user's schema, with the roles and options that were given in addition."""
    schema = as_schema(given, format, also)
    if wanted.default is not None or wanted.categories or wanted.dates or wanted.stack:
        raise DataError(
            "default, categories, dates and stack are without a schema; found a schema as well",
            do="write them into the schema: default of a column, options categories, dates, stack",
        )
    roles = wanted.roles({column.name: column.role for column in schema.columns})
    columns = tuple(c.model_copy(update={"role": roles[c.name]}) for c in schema.columns)
    return Schema(format=format, columns=columns, options={**schema.options, **options})


def check_schema(schema: Schema, fields: Mapping[str, pa.DataType], where: str) -> None:
    """Raise an error unless a table with these columns can be read with the schema."""
    for column in schema.columns:
        _check_default(column)
        if column.role == "unused":
            continue
        names = source_names(schema, column)
        stacked = is_stacked(schema, column)
        if stacked and column.shape != (len(names),):
            raise DataError(
                f"column {STACKED!r}: expected shape ({len(names)},), one for each of the "
                f"option stack, found {column.shape}",
                where=where,
            )
        for name in names:
            if name not in fields:
                raise DataError(
                    f"expected a column {name!r}, found {', '.join(fields)}",
                    where=where,
                    do="read only files with the same columns together, or correct the schema",
                )
            categories = schema.options.get("categories", {}).get(name)
            if categories is not None:
                _check_categories(name, categories, fields[name], where)
            shape = () if stacked else column.shape
            dated = name in schema.options.get("dates", {}) and is_text(fields[name])
            if dated and not column.dtype.startswith("float"):
                raise DataError(f"column {name!r}: dates become float32, found {column.dtype}")
            if not dated and not _fits(fields[name], column, shape, categories is not None):
                raise DataError(
                    f"column {name!r}: expected {column.words}, found {fields[name]}", where=where
                )


def _fits(type: pa.DataType, column: Column, shape: tuple[int, ...], coded: bool) -> bool:
    kind = _kind(type)
    if column.ragged or (kind.ragged and len(shape) == 1):
        # if all rows must have one length, each row is checked when it is read
        in_shape = kind.ragged
    else:
        in_shape = kind.shape == shape and not kind.ragged
    if coded:
        return in_shape and column.dtype != "bool"
    if column.dtype == "bool":
        return in_shape and kind.dtype == "bool"
    if is_date(values_type(type)):
        return in_shape and column.dtype.startswith("float")
    return in_shape and (kind.dtype is not None or pa.types.is_null(type))


def _check_categories(name: str, values: Any, type: pa.DataType, where: str) -> None:
    if pa.types.is_null(type):  # the column has only missing values
        return
    try:
        known = pa.array(values, values_type(type))
    except (pa.ArrowException, TypeError) as error:
        raise DataError(
            f"categories of column {name!r}: expected a list of {values_type(type)}: {error}",
            where=where,
        ) from error
    if len(known) == 0 or known.null_count or len(known.unique()) < len(known):
        raise DataError(
            f"categories of column {name!r}: expected values that differ, found {values!r}",
            where=where,
        )


def values_type(type: pa.DataType) -> pa.DataType:
    """Return the type of the values in lists, tensors and dictionaries; else the type itself."""
    while (
        isinstance(type, pa.FixedShapeTensorType)
        or pa.types.is_dictionary(type)
        or pa.types.is_list(type)
        or pa.types.is_large_list(type)
        or pa.types.is_fixed_size_list(type)
    ):
        type = type.value_type
    return type


def check_options(schema: Schema, also: Sequence[str] = ()) -> None:
    """Raise an error if a schema has an option that no code reads."""
    known = {"allow_nan", "stack", "categories", "unknown", "dates", "left_out", "defaults", *also}
    for name in schema.options:
        if name not in known:
            raise DataError(
                f"{schema.format} has no option {name!r}: the options are "
                f"{', '.join(sorted(known))}"
            )


def _check_default(column: Column) -> None:
    if column.default is None or column.dtype.startswith("float"):
        return
    dtype = column.numpy_dtype
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if column.default != int(column.default) or not low <= column.default <= high:
        raise DataError(
            f"column {column.name!r}: expected a default that is {dtype}, found {column.default}"
        )


def is_stacked(schema: Schema, column: Column) -> bool:
    """Return whether a column is made of several columns of the table."""
    return column.name == STACKED and "stack" in schema.options


def source_names(schema: Schema, column: Column) -> list[str]:
    """Return the names of the table's columns that a column is made of."""
    return list(schema.options["stack"]) if is_stacked(schema, column) else [column.name]


def used_names(schema: Schema) -> list[str]:
    """Return the names of all columns of the table that are read."""
    return [
        name
        for column in schema.columns
        if column.role != "unused"
        for name in source_names(schema, column)
    ]
