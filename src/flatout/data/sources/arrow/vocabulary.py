"""Numbers for the texts of a column: learned once from all rows, and kept in the schema.

A column whose texts repeat is taken for categories, numbered in the sorted order of the texts.
Numbers of an input start at 1; 0 stands for a missing or an unknown text. Numbers of a target start
at 0; a missing or an unknown text is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from flatout.data.reading.schema import Schema
from flatout.data.sources.arrow.arrow_schema import ColumnOptions, is_text, listed
from flatout.errors import DataError

# A column is taken for names or prose, not for categories, if it has more than _FEW different texts
# and these are more than a fraction of its rows. _SHARE: fraction if all rows were read;
# _SHARE_OF_SOME: fraction if only some rows were read, since texts may repeat in later rows.
_FEW, _SHARE, _SHARE_OF_SOME = 32, 0.5, 0.95
_NUMBERISH = re.compile(r"[\s€$£%+-]*\d[\d\s.,'/:%€$£TZ+-]*")
_WHOLE = re.compile(r"\s*[+-]?\d+\s*")
# Fraction of texts like numbers or dates from which on a column is not taken for categories.
_MOSTLY = 0.9
_ALIKE = "which look like numbers or dates"


class Texts(NamedTuple):
    """Different values of a column of texts, and the number of rows with a value."""

    values: frozenset[Any]
    rows: int


# Returns the texts of columns. Arguments: names of columns, and whether some of the rows suffice.
Count: TypeAlias = "Callable[[Sequence[str], bool], Mapping[str, Texts]]"


def with_vocabularies(
    wanted: ColumnOptions, fields: Mapping[str, pa.DataType], count: Count
) -> ColumnOptions:
    """Return the options with the learned categories of all columns that need them."""
    roles = wanted.roles(dict.fromkeys(fields, "input"))
    fixed, asked = wanted.fixed_categories(fields), wanted.asked_categories(fields)
    texts = [
        name
        for name, type in fields.items()
        if roles[name] in ("input", "target")
        and name not in fixed
        and name not in asked
        and name not in wanted.date_formats(fields)
        and is_text(type)
    ]
    refused: dict[str, str] = {}
    for few in (True, False):  # the first rows show prose, so prose is not read to its end
        left = [name for name in texts if name not in refused]
        counts = count([*left, *asked], few) if left or (asked and not few) else {}
        share = _SHARE_OF_SOME if few else _SHARE
        refused.update({n: w for n in left if (w := _no_categories(counts[n], share))})
    named = {*listed(wanted.inputs), *listed(wanted.target)} if wanted.leave_out else refused
    if wrong := {name: why for name, why in refused.items() if name in named}:
        raise _refusal(wrong)
    learned = {name: sorted(counts[name].values) for name in counts if name not in refused}
    for name, values in learned.items():
        if not values:
            raise DataError(
                f"column {name!r}: expected categories, found missing values alone",
                do="leave it out with unused=, or name the file's encoding= if its texts are there "
                "and not in UTF-8",
            )
    return replace(
        wanted,
        categories={**fixed, **learned},
        unknown=tuple(name for name in learned if roles[name] == "input"),
        left_out=(*wanted.left_out, *refused),
        numberish=tuple(name for name, why in refused.items() if why.endswith(_ALIKE)),
        unused=[*listed(wanted.unused), *refused],
    )


def _no_categories(texts: Texts, share: float) -> str:
    values, rows = texts
    if not values:  # no text could be read: an encoding error is reported with its line
        return ""
    alike = [text for text in values if _NUMBERISH.fullmatch(text)]
    if all(map(_WHOLE.fullmatch, values)):
        largest = max(values, key=lambda text: abs(int(text)))
        if abs(int(largest)) >= 2**63:
            return f"whole numbers beyond int64, such as {largest.strip()}"
    if len(alike) >= _MOSTLY * len(values):
        return f"texts such as {min(alike)!r}, {_ALIKE}"
    if len(values) > _FEW and len(values) > share * rows:
        return f"{len(values):,} different texts in {rows:,} rows"
    return ""


def _refusal(refused: Mapping[str, str]) -> DataError:
    words = "; ".join(f"column {name!r} holds {why}" for name, why in refused.items())
    names = list(refused)
    do = f"leave out what is no input: unused={names!r}; or number the texts: categories={names!r}"
    if any(why.endswith(_ALIKE) for why in refused.values()):
        do += (
            f"; for dates say how they are written: dates={{{names[0]!r}: '%d.%m.%Y'}}; for "
            "numbers, the decimal sign: decimal=','"
        )
    return DataError(f"expected numbers or categories: {words}", do=do)


def merged(parts: Iterable[Mapping[str, Texts]]) -> dict[str, Texts]:
    values: dict[str, set[Any]] = {}
    rows: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, set()).update(value.values)
            rows[name] = rows.get(name, 0) + value.rows
    return {name: Texts(frozenset(values[name]), rows[name]) for name in values}


def texts_of(table: pa.Table, names: Sequence[str]) -> dict[str, Texts]:
    texts = {}
    for name in names:
        column = table[name].drop_null()
        while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            column = pc.list_flatten(column).drop_null()
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_floating(column.type):  # NaN is a missing value, and no two NaN are equal
            column = column.filter(pc.invert(pc.is_nan(column)))
        texts[name] = Texts(frozenset(column.unique().to_pylist()), len(column))
    return texts


def notes_of(options: Mapping[str, Any], numberish: Sequence[str] = ()) -> list[str]:
    """Return lines about the learned categories and the columns of text that were left out."""
    known, notes = options.get("categories", {}), []
    learned = [f"{name} {len(known[name]):,}" for name in options.get("unknown", ())]
    if learned:
        notes.append(f"categories by their texts, 0 for unknown ones: {', '.join(learned)}")
    if options.get("left_out"):
        notes.append(f"columns of text left out: {', '.join(options['left_out'])}")
    if numberish:
        first = numberish[0]
        notes.append(
            f"texts of {', '.join(numberish)} look like numbers or dates: for dates say how they "
            f"are written, such as --date {first}=%d.%m.%Y (dates={{{first!r}: '%d.%m.%Y'}})"
        )
    return notes


def left_out_notes(schema: Schema, names: Iterable[str]) -> list[str]:
    """Return lines about columns that a schema leaves out without calling them unused."""
    known = {column.name for column in schema.columns} | set(schema.options.get("stack", ()))
    left_out = schema.options.get("left_out", ())
    notes = notes_of({"left_out": left_out})
    others = [name for name in names if name not in known and name not in left_out]
    if others:
        notes.append(f"columns that the schema does not name, left out: {', '.join(others)}")
    return notes
