"""Columns of a source: name, dtype, shape and role in the training of each.

A source infers its schema. `pipeline.schema.dump(path)` writes the schema as a TOML file for the
user to read and edit:

    format = "libsvm"

    [options]
    base = 1

    [[columns]]
    name = "label"
    dtype = "int64"
    role = "target"
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flatout.errors import DataError, as_data_error
from flatout.recipe import parse

# Maximum number of characters of a wrong value that an error shows.
_SHOWN = 400
Role = Literal["input", "target", "weight", "unused"]
DType = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"
]  # fmt: skip
# Types that a user may pass as `schema=`.
Given: TypeAlias = "Schema | str | os.PathLike[str] | dict[str, Any]"


class Ids(BaseModel):
    """Rows of a table for the ids of a column, or of some positions in its rows.

    An id has a row of its own, or it shares `buckets` rows with other ids. Fields are separate: the
    same number in two fields is two ids.

    Attributes:
        vocabulary: which ids get rows of their own. "grow": ids of the training data, and new ids
            of each later training (a warm start); "fixed": ids of the first training; "none": no
            id.
        buckets: number of rows for the ids without a row of their own. 1: all these ids use one
            row; more: they are hashed to these rows; 0: such an id is an error.
        admit: number of times that an id has to occur, over all trainings, to get a row.
        forget: number of consecutive trainings without an id after which it loses its row; None
            never removes an id.
        most: maximum number of rows of single ids. The rarest ids lose their rows. None: no limit.
        places: positions in a row, from 0, to which this entry applies; None: all positions that no
            other entry names.
        by_place: whether each position is a field of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocabulary: Literal["grow", "fixed", "none"] = "grow"
    buckets: int = Field(1, ge=0, le=2**40)
    admit: int = Field(1, ge=1)
    forget: int | None = Field(None, ge=1)
    most: int | None = Field(None, ge=1)
    places: tuple[int, ...] | None = None
    by_place: bool = False

    @model_validator(mode="after")
    def _has_rows(self) -> Ids:
        if self.vocabulary == "none" and self.buckets == 0:
            raise ValueError('ids: vocabulary="none" wants buckets of at least 1')
        return self


class Column(BaseModel):
    """One column of a source.

    Attributes:
        name: name of the column in the data, or as the source documents it.
        dtype: numpy's name of the dtype.
        shape: shape of one row's values; () is a single number.
        ragged: whether rows have different numbers of values; `shape` is then (). A batch pads its
            rows with `pad` to the longest row of the batch.
        role: use of the column in training: "input", "target", "weight" or "unused".
        default: value that replaces a missing value; None makes a missing value an error.
        pad: value that fills a ragged row up.
        lengths: name of an additional input with the true length of each ragged row, int64 of
            shape (size,); None adds no such input.
        ids: rules by which the column's ids become rows of a table; empty without such a table.
            Each entry is about different positions in a row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    dtype: DType
    shape: tuple[int, ...] = ()
    ragged: bool = False
    role: Role = "input"
    default: int | float | None = None
    pad: int | float = 0
    lengths: str | None = None
    ids: tuple[Ids, ...] = ()

    @model_validator(mode="after")
    def _shape_makes_sense(self) -> Column:
        if any(size < 1 for size in self.shape):
            raise ValueError(f"column {self.name!r}: sizes in shape must be at least 1")
        if self.ragged and self.shape:
            raise ValueError(f"column {self.name!r} is ragged, so it has no shape")
        if self.lengths is not None and not self.ragged:
            raise ValueError(f"column {self.name!r} has lengths, but is not ragged")
        return self

    @model_validator(mode="after")
    def _ids_make_sense(self) -> Column:
        if not self.ids:
            return self
        if self.dtype != "int64" or self.role != "input":
            raise ValueError(
                f"column {self.name!r} has ids, so its dtype is int64 and its role input; found "
                f"{self.dtype} and {self.role}"
            )
        if len(self.shape) > 1:
            raise ValueError(f"column {self.name!r} has ids, so its rows are vectors or numbers")
        width = self.shape[0] if self.shape else 1
        named = [place for item in self.ids for place in item.places or ()]
        if self.ragged and (named or any(item.by_place for item in self.ids)):
            raise ValueError(f"column {self.name!r} is ragged, so its places are no fields")
        wrong = [place for place in named if not 0 <= place < width]
        twice = [place for place in named if named.count(place) > 1]
        if wrong or twice:
            raise ValueError(
                f"column {self.name!r}: ids of place {(wrong or twice)[0]}, expected each place "
                f"from 0 to {width - 1} in one entry"
            )
        others = sum(item.places is None for item in self.ids)
        if others > 1 or (not others and len(named) < width):
            raise ValueError(
                f"column {self.name!r}: expected one entry of ids without places, for all that no "
                f"other entry has, found {others}"
            )
        return self

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype as a numpy object."""
        return np.dtype(self.dtype)

    @property
    def words(self) -> str:
        """The column in words, such as "ids int64 x39" or "ids int64 ragged"."""
        shape = " ragged" if self.ragged else "".join(f" x{size}" for size in self.shape)
        return f"{self.name} {self.dtype}{shape}"


class Schema(BaseModel):
    """The columns of a source and the options of its format.

    Attributes:
        format: the source that reads the data, such as "libsvm".
        columns: columns in the order of the format. Training needs at least one column of role
            "input".
        options: further settings of the format; each source documents its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str
    columns: tuple[Column, ...] = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _names_differ(self) -> Schema:
        names = [column.name for column in self.columns]
        names += [column.lengths for column in self.columns if column.lengths is not None]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several columns are called {', '.join(map(repr, twice))}")
        return self

    def __getitem__(self, name: str) -> Column:
        """Return the column of that name."""
        for column in self.columns:
            if column.name == name:
                return column
        raise KeyError(name)

    def of_role(self, role: Role) -> tuple[Column, ...]:
        """Return the columns in that role."""
        return tuple(column for column in self.columns if column.role == role)

    @property
    def embedding_rows(self) -> dict[str, int]:
        """Rows that an embedding of each input of categories needs, including row 0."""
        known, unknown = self.options.get("categories", {}), self.options.get("unknown", ())
        inputs = [column.name for column in self.of_role("input")]
        return {name: len(known[name]) + (name in unknown) for name in inputs if name in known}

    @property
    def classes(self) -> list[str] | None:
        """Names of the target's numbers, from 0; None if the target has only numbers."""
        if "classes" in self.options:
            return list(self.options["classes"])
        targets = [column.name for column in self.of_role("target")]
        known = self.options.get("categories", {})
        if len(targets) != 1 or targets[0] not in known:
            return None
        return list(map(str, known[targets[0]]))

    def with_target(self, name: str) -> Schema:
        """Return the schema with this column as the only target."""
        roles: dict[str, Role] = {column.name: "input" for column in self.of_role("target")}
        return self.with_roles(**{**roles, name: "target"})

    def with_roles(self, **roles: Role) -> Schema:
        """Return the schema with other roles: `schema.with_roles(clicks="target")`.

        Raises:
            DataError: there is no such column.
        """
        self._check_names(roles)
        columns = [c.model_copy(update={"role": roles.get(c.name, c.role)}) for c in self.columns]
        return Schema(format=self.format, columns=tuple(columns), options=self.options)

    def with_dtypes(self, dtypes: Mapping[str, DType]) -> Schema:
        """Return the schema with other dtypes: `schema.with_dtypes({"price": "float32"})`.

        Raises:
            DataError: a column or a dtype does not exist.
        """
        self._check_names(dtypes)
        columns = [{**c.model_dump(), "dtype": dtypes.get(c.name, c.dtype)} for c in self.columns]
        return _read({**self.model_dump(), "columns": columns}, self.format)

    def _check_names(self, names: Iterable[str]) -> None:
        known = {column.name for column in self.columns}
        for name in names:
            if name not in known:
                raise DataError(f"no column {name!r}: the columns are {', '.join(sorted(known))}")

    def with_ids(self, **columns: Ids | Sequence[Ids]) -> Schema:
        """Return the schema with ids stated for columns: `schema.with_ids(ids=Ids(buckets=1000))`.

        Raises:
            DataError: there is no such column, or it cannot have ids.
        """
        given = {name: (v,) if isinstance(v, Ids) else tuple(v) for name, v in columns.items()}
        self._check_names(given)
        result = [
            {**c.model_dump(), "ids": [item.model_dump() for item in given.get(c.name, c.ids)]}
            for c in self.columns
        ]
        return _read({**self.model_dump(), "columns": result}, self.format)

    def dumps(self) -> str:
        """Return the schema as TOML."""
        fields = self.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        names = ("format", "options", "columns")
        ordered: dict[str, Any] = {name: fields[name] for name in names if name in fields}
        return tomli_w.dumps(ordered)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a TOML file, as `dump` and `flatout data inspect --schema` write it.

        Raises:
            DataError: the file cannot be read, or is no schema.
        """
        return _read(path, "")

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write the schema as a TOML file.

        Raises:
            DataError: the file cannot be written.
        """
        with as_data_error("the schema cannot be written", os.fspath(path)):
            Path(path).write_text(self.dumps(), encoding="utf-8")


def as_schema(given: Given, format: str, also: Sequence[str] = ()) -> Schema:
    """Return the schema given as a Schema, as the path of a TOML file, or as a dict.

    Args:
        given: the user's argument.
        format: name of the expected format.
        also: other accepted formats.

    Raises:
        DataError: it cannot be read, is no schema, or is one of another format.
    """
    schema = given if isinstance(given, Schema) else _read(given, format)
    if schema.format != format and schema.format not in also:
        raise DataError(f"expected a schema of {format}, found one of {schema.format}")
    return schema


def _read(given: str | os.PathLike[str] | dict[str, Any], format: str) -> Schema:
    where = None
    if isinstance(given, dict):
        content = {"format": format, **given}
    else:
        where, content = os.fspath(given), read_toml(given)
    try:
        return Schema.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "schema"
        actual = "" if first["type"] == "value_error" else f", found {_shown(first['input'])}"
        raise DataError(f"{field}: {first['msg']}{actual}", where=where) from error
    except RecursionError as error:
        raise DataError("a schema is not nested so deeply", where=where) from error


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return "something nested deeply"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    where = os.fspath(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataError("a schema is a file, and this is none", where=where)
        return parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the schema: {words}", where=where) from error
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"the schema is no TOML: {error}", where=where) from error
    except RecursionError as error:
        raise DataError("a schema is not nested so deeply", where=where) from error
