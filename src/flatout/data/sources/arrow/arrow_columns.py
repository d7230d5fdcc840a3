"""Conversion of columns of Arrow tables to arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.data.reading.block import Numbers, Ragged, Values, offsets_of
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.changed import ROUNDED, Changes, exact_up_to, rounded_words
from flatout.data.reading.schema import Column, Schema
from flatout.data.sources.arrow.arrow_schema import (
    ISO_TYPES,
    is_date,
    is_stacked,
    is_text,
    source_names,
)


class BadValue(Exception):
    """A value that does not fit the schema.

    Attributes:
        row: row of the value.
        what: the column, and what was expected and found.
        byte: position of the fault in the row.
        do: advice for the user.
    """

    def __init__(self, row: int, what: str, byte: int = 0, do: str = "fix it") -> None:
        super().__init__(what)
        self.do = do
        self.row = row
        self.what = what
        self.byte = byte


# A function that gets a column with whole numbers that its dtype may round. Its arguments are the
# column's name, the table's values, the converted values, and a function that returns the row of a
# value.
Large: TypeAlias = "Callable[[str, npt.NDArray[Any], npt.NDArray[Any], Callable[[int], int]], None]"


def to_columns(
    table: pa.Table, schema: Schema, buffers: Buffers, large: Large | None = None
) -> dict[str, Values]:
    """Return the columns that the schema uses, in arrays from `buffers`."""
    columns: dict[str, Values] = {}
    for column in schema.columns:
        if column.role == "unused":
            continue
        if is_stacked(schema, column):
            out = buffers.empty((len(table), *column.shape), column.numpy_dtype)
            defaults = schema.options.get("defaults", {})
            for at, name in enumerate(source_names(schema, column)):
                own = column
                if name in defaults:
                    own = column.model_copy(update={"default": defaults[name]})
                reader = _Reader(name, own, schema, large)
                reader.scalars(_in_one_piece(table[name]), out[:, at])
            columns[column.name] = out
        else:
            array = _in_one_piece(table[column.name])
            reader = _Reader(column.name, column, schema, large)
            columns[column.name] = reader.column(array, buffers)
    return columns


def _in_one_piece(chunked: pa.ChunkedArray) -> pa.Array:
    array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    return array.storage if isinstance(array, pa.ExtensionArray) else array


class _Reader:
    def __init__(self, name: str, to: Column, schema: Schema, large: Large | None) -> None:
        self.name = name
        self.to = to
        self.categories = schema.options.get("categories", {}).get(name)
        self.has_unknown = name in schema.options.get("unknown", ())
        self.date = schema.options.get("dates", {}).get(name)
        self.allow_nan = bool(schema.options.get("allow_nan", False))
        self.large = large if self.categories is None and self.date is None else None

    def column(self, array: pa.Array, buffers: Buffers) -> Values:
        if self.to.ragged:
            return self._ragged(array, buffers)
        out = buffers.empty((len(array), *self.to.shape), self.to.numpy_dtype)
        if self.to.shape:
            self._lists(array, out)
        else:
            self.scalars(array, out)
        return out

    def scalars(self, array: pa.Array, out: npt.NDArray[Any]) -> None:
        self._fill(array, out, lambda index: index)

    def _lists(self, array: pa.Array, out: npt.NDArray[Any]) -> None:
        size = math.prod(self.to.shape)
        missing = self._missing(array)
        rows = np.flatnonzero(~missing)
        if not pa.types.is_fixed_size_list(array.type):
            other = np.flatnonzero(_lengths(array)[rows] != size)
            if len(other):
                row = int(rows[other[0]])
                raise self._bad(row, f"{size:,} values", f"{len(array[row]):,}")
        flat = array.flatten()
        while pa.types.is_fixed_size_list(flat.type):
            if flat.null_count:
                index = _first(flat.is_null()) * len(rows) // len(flat)
                raise self._bad(int(rows[index]), f"{size:,} values", "a missing list among them")
            flat = flat.flatten()
        values = np.empty(len(flat), out.dtype) if missing.any() else out.reshape(-1)
        self._fill(flat, values, lambda index: int(rows[index // size]))
        if missing.any():
            out[missing] = self.to.default
            out[rows] = values.reshape(-1, *self.to.shape)

    def _ragged(self, array: pa.Array, buffers: Buffers) -> Ragged:
        self._missing(array)
        offsets = offsets_of(_lengths(array))
        flat = array.flatten()
        out = buffers.empty(len(flat), self.to.numpy_dtype)
        self._fill(flat, out, lambda index: int(np.searchsorted(offsets, index, "right")) - 1)
        return Ragged(out, offsets)

    def _missing(self, array: pa.Array) -> npt.NDArray[np.bool_]:
        if array.null_count == 0:
            return np.zeros(len(array), bool)
        if self.to.default is None:
            raise self._bad_missing(_first(array.is_null()))
        missing: npt.NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
        return missing

    def _fill(self, array: pa.Array, out: npt.NDArray[Any], row_of: Callable[[int], int]) -> None:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if self.categories is not None:
            array = self._codes(array, row_of)
        elif is_date(array.type) or self.date is not None:
            array = self._days(array, row_of)
        array = self._cast(array, row_of)
        if array.null_count:
            if self.to.default is None:
                raise self._bad_missing(row_of(_first(array.is_null())))
            array = array.fill_null(pa.scalar(self.to.default).cast(array.type))
        values = array.to_numpy(zero_copy_only=False)
        # A value that is too large for float32 becomes infinite, and is detected below.
        with np.errstate(over="ignore"):
            out[...] = values
        if out.dtype.kind == "f" and len(out):
            most = max(out.max(), -out.min())
            if not (self.allow_nan or np.isfinite(most)):
                index = int(np.argmin(np.isfinite(out)))
                text = f"{values[index]} (allow_nan=True lets it pass)"
                raise self._bad(row_of(index), f"a finite {self.to.dtype}", text)
            if self.large is not None and not most < exact_up_to(out.dtype):
                self.large(self.name, values, out, row_of)

    def _codes(self, array: pa.Array, row_of: Callable[[int], int]) -> pa.Array:
        if pa.types.is_null(array.type):
            array = array.cast(pa.array(self.categories).type)
        codes = _index_in(array, self.categories)
        if self.has_unknown:
            return pc.add(codes, 1).fill_null(0)
        unknown = pc.and_(codes.is_null(), array.is_valid())
        if pc.any(unknown).as_py():
            index = _first(unknown)
            words = f"one of {len(self.categories):,} categories"
            raise self._bad(row_of(index), words, repr(array[index].as_py()))
        return codes

    def _days(self, array: pa.Array, row_of: Callable[[int], int]) -> pa.Array:
        if is_text(array.type):
            array = self._dates(array.cast(pa.string()), row_of)
        if pa.types.is_date32(array.type):
            return array.cast(pa.int32())
        if pa.types.is_time(array.type):
            array = array.cast(pa.time64("us"))
        else:
            array = array.cast(pa.timestamp("us", getattr(array.type, "tz", None)), safe=False)
        return pc.divide(array.cast(pa.int64()).cast(pa.float64(), safe=False), 86_400e6)

    def _dates(self, texts: pa.Array, row_of: Callable[[int], int]) -> pa.Array:
        # An empty text is a missing value, as in CSV.
        texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
        if self.date in ISO_TYPES:
            wanted = ISO_TYPES[self.date]
            try:
                return texts.cast(wanted)
            except pa.ArrowInvalid:
                index = _first_failing(texts, wanted)
        else:
            dates = pc.strptime(texts, self.date, "us", error_is_null=True)
            wrong = pc.and_(dates.is_null(), texts.is_valid())
            if not pc.any(wrong).as_py():
                return dates
            index = _first(wrong)
        raise self._bad(row_of(index), f"a date as {self.date!r}", repr(texts[index].as_py()))

    def _cast(self, array: pa.Array, row_of: Callable[[int], int]) -> pa.Array:
        to_float = self.to.dtype.startswith("float")
        if to_float and (pa.types.is_floating(array.type) or pa.types.is_integer(array.type)):
            return array
        wanted = pa.float64() if to_float else pa.from_numpy_dtype(self.to.numpy_dtype)
        try:
            return array.cast(wanted)
        except pa.ArrowInvalid:
            index = _first_failing(array, wanted)
            text = repr(array[index].as_py())
            raise self._bad(row_of(index), self.to.dtype, text) from None

    def _bad_missing(self, row: int) -> BadValue:
        text = f"a missing value, and there is no default for it (default={{{self.name!r}: 0}})"
        return self._bad(row, self.to.dtype, text)

    def _bad(self, row: int, expected: str, text: str) -> BadValue:
        return BadValue(row, f"column {self.name!r}: expected {expected}, found {text}")


def _index_in(array: pa.Array, values: list[Any]) -> pa.Array:
    has_words = is_text(array.type) or pa.types.is_integer(array.type)
    if len(values) < _MANY * len(array) or not has_words:
        made = _made_of(values, str(array.type), lambda: pa.array(values, array.type))
        return pc.index_in(array, value_set=made)
    # Arrow would hash the whole list in each call.
    places = _made_of(values, "dict", lambda: {value: at for at, value in enumerate(values)})
    index = array.dictionary_encode()
    codes = [places.get(value) for value in index.dictionary.to_pylist()]
    return pa.array(codes, pa.int32()).take(index.indices)


# Largest number that may be an id. Larger numbers are measurements, which may be rounded.
_LARGEST_ID = 2.0**64
# Categories per row from which on looking up each row is faster than hashing all categories.
_MANY = 4
# Objects made from a schema's lists: made once, not for every batch.
_MADE: dict[tuple[int, str], tuple[list[Any], Any]] = {}
# Maximum number of objects in _MADE.
_MOST_MADE = 256


def _made_of(values: list[Any], kind: str, make: Callable[[], Any]) -> Any:
    key = (id(values), kind)
    kept = _MADE.get(key)
    if kept is None or kept[0] is not values:
        if len(_MADE) >= _MOST_MADE:
            _MADE.clear()
        kept = _MADE[key] = (values, make())
    return kept[1]


def may_be_rounded(fields: Mapping[str, pa.DataType], schema: Schema) -> dict[str, str]:
    """Return the columns whose whole numbers may be rounded, with their dtypes of floats."""
    coded = {*schema.options.get("categories", {}), *schema.options.get("dates", {})}
    return {
        name: column.dtype
        for column in schema.columns
        if column.role != "unused" and column.dtype.startswith("float")
        for name in source_names(schema, column)
        if name not in coded and _is_wider(fields.get(name, pa.null()))
    }


def _is_wider(type: pa.DataType) -> bool:
    is_whole = pa.types.is_integer(type) and type.bit_width > 16
    return bool(is_whole or pa.types.is_float64(type) or pa.types.is_decimal(type))


def note_rounding(
    changes: Changes,
    name: str,
    values: npt.NDArray[Any],
    out: npt.NDArray[Any],
    where: Callable[[int], str],
) -> None:
    """Note a column whose whole numbers, such as ids, were rounded, if no fraction was rounded."""
    if values.dtype == out.dtype or not changes.watches(name, ROUNDED):
        return
    size = np.abs(out)
    places = np.flatnonzero((size >= exact_up_to(out.dtype)) & (size < np.inf))
    exact = values[places].astype(np.longdouble)
    changed = exact != out[places]
    if not changed.any():
        return
    rounded = exact[changed]
    if ((rounded == np.rint(rounded)) & (np.abs(rounded) < _LARGEST_ID)).all():
        place = places[np.argmax(changed)]
        advice = f"for ids pass categories=[{name!r}]"
        line = rounded_words(name, out.dtype, str(int(values[place])), advice)
        changes.add(name, f"{where(int(place))}: {line}")
    else:
        changes.expect(name, ROUNDED)


def note_rounding_of(
    table: pa.Table, schema: Schema, changes: Changes, where: Callable[[int], str]
) -> None:
    """Note each column of a table, such as ids, whose whole numbers a float dtype rounds."""
    fields = {field.name: field.type for field in table.schema}
    for name, dtype in may_be_rounded(fields, schema).items():
        column = table[name]
        rows = np.flatnonzero(column.is_valid().to_numpy())
        present = column.drop_null()
        if pa.types.is_decimal(present.type):
            present = present.cast(pa.float64(), safe=False)
        values = present.to_numpy()
        with np.errstate(over="ignore"):
            out = values.astype(dtype)

        def place(at: int, rows: Numbers = rows) -> str:
            return where(int(rows[at]))

        note_rounding(changes, name, values, out, place)


def _lengths(array: pa.Array) -> Numbers:
    lengths: Numbers = array.value_lengths().fill_null(0).to_numpy().astype(np.int64)
    return lengths


def _first(flags: pa.Array) -> int:
    return int(np.argmax(flags.to_numpy(zero_copy_only=False)))


def _first_failing(array: pa.Array, wanted: pa.DataType) -> int:
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            array.slice(low, middle - low).cast(wanted)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low
