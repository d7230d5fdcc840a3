"""A Recipe as TOML, requested or resolved.

A requested Recipe holds the fields that were named, a table a section. A resolved one holds every
field, the `machine`, and a table such as `choices."compute.precision"` with the reason for each;
one with `proven_for`, a script, holds only the fields that were proven for it. A field that a
resolved one does not name is as plain PyTorch: the version that wrote it had no such setting.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, TypeAlias

from flatout.atomic_file import atomic_write
from flatout.errors import RecipeError
from flatout.recipe.parity import Parity
from flatout.recipe.recipe import Choice, Recipe, ResolvedRecipe
from flatout.recipe.refusal import FieldError, bad_value
from flatout.recipe.sections import PLAIN, split
from flatout.recipe.setting import Value

_LONG_KEY = re.compile(r"""(?:[\w"'-]+[ \t]*\.[ \t]*){100}""")
_LATER = "not yet a setting of the version that wrote this"
_REQUESTED = "# A Recipe for Flatout. What is not named here is measured, or keeps its default.\n\n"
_RESOLVED = "# A Recipe for Flatout, resolved on the machine below; the choices say why.\n\n"


GivenRecipe: TypeAlias = Recipe | ResolvedRecipe | str | os.PathLike[str]


def as_recipe(given: GivenRecipe | None) -> Recipe | ResolvedRecipe | None:
    """Return a Recipe as it is, and read one from the path of a TOML file.

    Raises:
        RecipeError: the value is neither, or `load` refuses the file.
    """
    if given is None or isinstance(given, Recipe | ResolvedRecipe):
        return given
    if isinstance(given, str | os.PathLike):
        return load(given)
    raise RecipeError(
        f"expected a Recipe or the path of its TOML file, found {type(given).__name__}",
        do="make one with flatout.Recipe(...), or read it with flatout.recipe.load(path)",
    )


def load(path: str | os.PathLike[str]) -> Recipe | ResolvedRecipe:
    """Read a Recipe from a TOML file.

    Raises:
        RecipeError: the file cannot be read, is not TOML, or holds an unknown field or a bad value.
    """
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise RecipeError(f"cannot read the Recipe: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise RecipeError(
            "a Recipe is UTF-8 text, and this is not", where=f"{path}: byte {error.start}"
        ) from error
    return loads(text, source=str(path))


def loads(text: str, *, source: str = "TOML text") -> Recipe | ResolvedRecipe:
    """Read a Recipe from TOML text; it is resolved if it has a table `machine` or `choices`.

    Args:
        text: the TOML.
        source: what the text is called in errors, where it stands before the line.

    Raises:
        RecipeError: the text is not TOML, or holds an unknown field or a bad value.
    """
    import tomllib

    try:
        tables = parse(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        number = int(line[1]) if line else text.count("\n") + 1
        raise RecipeError(f"this is not TOML: {error}", where=f"{source}:{number}") from error
    except RecursionError as error:
        raise RecipeError("a Recipe is not nested so deeply", where=source) from error
    try:
        return _resolved(tables) if {"choices", "machine"} & set(tables) else Recipe(**tables)
    except FieldError as error:
        line_number = _line_of(text, error.path)
        raise error.at(f"{source}:{line_number}" if line_number else source) from None
    except RecursionError as error:
        raise RecipeError("a Recipe is not nested so deeply", where=source) from error


def parse(text: str) -> dict[str, Any]:
    """Return the content of TOML text.

    Raises:
        RecursionError: it is nested more deeply than anything that people write.
        TOMLDecodeError: it is no TOML.
    """
    import tomllib

    # Python's parser takes time with the square of a dotted key's length.
    if _LONG_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def dump(
    recipe: Recipe | ResolvedRecipe, path: str | os.PathLike[str], *, comment: str = ""
) -> None:
    """Write a Recipe to a TOML file, whole or not at all.

    Args:
        recipe: what to write.
        path: of the file.
        comment: a line that stands first, without its number sign.

    Raises:
        RecipeError: the file cannot be written; what was there before is still there.
    """
    data = ((f"# {comment}\n" if comment else "") + dumps(recipe)).encode()
    try:
        real = path if os.path.abspath(path).startswith("/dev/") else os.path.realpath(path)
        with atomic_write(real, "wb", durable=True) as file:
            file.write(data)
    except OSError as error:
        raise RecipeError(f"cannot write the Recipe: {error.strerror}", where=str(path)) from error


def dumps(recipe: Recipe | ResolvedRecipe) -> str:
    """Return a Recipe as TOML; `loads` gives back one that is equal."""
    import tomli_w

    if isinstance(recipe, Recipe):
        return _REQUESTED + tomli_w.dumps(_tables(recipe.named()))
    proven = {"proven_for": recipe.proven_for} if recipe.proven_for else {}
    whole = {
        **proven,
        **_tables(recipe.resolved()),
        "machine": recipe.machine,
        "choices": {field: _row(recipe.choices[field]) for field in recipe.resolved()},
    }
    return _RESOLVED + tomli_w.dumps(whole)


def _tables(fields: dict[str, Value]) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for field, value in fields.items():
        section, name = split(field)
        # TOML has no None: the one field that takes it reads "off".
        tables.setdefault(section, {})[name] = "off" if value is None else value
    return tables


def _row(choice: Choice) -> dict[str, Any]:
    numbers = choice.model_dump(include={"ratio", "low", "high", "floor"}, exclude_none=True)
    return {"reason": choice.reason, "parity": choice.parity.words, **numbers}


def _resolved(tables: dict[str, Any]) -> ResolvedRecipe:
    beside = ("choices", "machine", "proven_for")
    sections = Recipe(**{k: v for k, v in tables.items() if k not in beside})
    rows = tables.get("choices", {})
    if not isinstance(rows, dict):
        raise bad_value("choices", rows, "a table for each field")
    choices = {field: _choice(field, row, sections) for field, row in rows.items()}
    if not tables.get("proven_for"):
        later = {
            field: Choice(value=value, reason=_LATER, parity=Parity.EXACT)
            for field, value in PLAIN.items()
            if field not in choices and field not in sections.named()
        }
        sections = sections.replace({field: choice.value for field, choice in later.items()})
        choices |= later
    return ResolvedRecipe(**{**tables, **dict(sections), "choices": choices})


def _choice(field: str, row: Any, sections: Recipe) -> Choice:
    try:
        if not isinstance(row, dict):
            raise bad_value(field, row, "a table with reason and parity")
        return Choice(**{"value": sections.get(field), **row})
    except FieldError as error:
        error.path = ("choices", field, *error.path[1:])
        raise


def _line_of(text: str, path: tuple[str, ...]) -> int | None:
    """Return the number of the line that names the key at `path`, or else the closest one above."""
    table: tuple[str, ...] = ()
    depth, closest = 0, None
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(r"\s*\[+(.+?)\]+\s*(#.*)?$", line):
            keys = table = _keys(header[1])
        elif assignment := re.match(r"([^=#]+)=", line):
            keys = table + _keys(assignment[1])
        else:
            continue
        if len(keys) > depth and keys == path[: len(keys)]:
            depth, closest = len(keys), number
    return closest


def _keys(dotted: str) -> tuple[str, ...]:
    import tomllib

    try:
        table: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    keys = []
    while isinstance(table, dict):
        ((key, table),) = table.items()
        keys.append(key)
    return tuple(keys)
