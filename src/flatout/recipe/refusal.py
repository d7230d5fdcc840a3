"""Refusals: pydantic's verdict on a field, told as what was found and what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from flatout.errors import RecipeError


class FieldError(RecipeError):
    """A RecipeError that knows its field, so that what read the text can say where it stands."""

    def __init__(
        self,
        what: str,
        *,
        path: tuple[str, ...] = (),
        where: str | None = "in code",
        do: str | None = None,
    ) -> None:
        super().__init__(what, where=where, do=do)
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are remade from their message alone, which holds place and advice already.
        return partial(FieldError, self.what, path=self.path, where=self.where, do=self.do), ()

    def at(self, where: str) -> RecipeError:
        return RecipeError(self.what, where=where, do=self.do)


class PlainData(BaseModel):
    """Frozen plain data that answers a wrong name or value with a FieldError.

    `title` is what stands before a field's name in errors, `known` the full names to look through
    for the one that was meant.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: ClassVar[str] = ""
    known: ClassVar[tuple[str, ...]] = ()

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _refusal(error, type(self), values) from None


def _refusal(error: ValidationError, model: type[PlainData], values: dict[str, Any]) -> FieldError:
    first = error.errors(include_url=False)[0]
    inner = first.get("ctx", {}).get("error")
    # A section inside a Recipe, or a validator, has already said what is wrong.
    if isinstance(inner, FieldError):
        return inner
    name = str(first["loc"][0])
    full = f"{model.title}.{name}" if model.title else name
    path = tuple(full.split("."))
    if first["type"] == "missing":
        return FieldError(f"{full} is missing; allowed: {allowed(model, name)}", path=path)
    if first["type"] == "extra_forbidden":
        return unknown(full, model.known, f"{model.title or 'a Recipe'} takes", model.model_fields)
    return bad_value(full, values[name], allowed(model, name))


def bad_value(full: str, value: object, words: str) -> FieldError:
    candidates = [word for word in re.split(", | or ", words) if word.isidentifier()]
    near = get_close_matches(str(value), candidates, 1)
    return FieldError(
        f"{full} cannot be {as_toml(value)}; allowed: {words}",
        path=tuple(full.split(".")),
        do=f"did you mean {near[0]}?" if near else None,
    )


def unknown(full: str, known: Iterable[str], taker: str, names: Iterable[str]) -> FieldError:
    near = closest(full, known)
    return FieldError(
        f"{full} is not a field of a Recipe; {taker} {', '.join(names)}",
        path=tuple(full.split(".")),
        do=f"did you mean {near}?" if near else None,
    )


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known full name that `name` probably meant: `compute.threads` the process' one."""
    full_names = list(known)
    by_last = {full.rpartition(".")[2]: full for full in full_names}
    last = name.rpartition(".")[2]
    if last in by_last:
        return by_last[last]
    if near := get_close_matches(name, full_names, 1, 0.75):
        return near[0]
    near_last = get_close_matches(last, list(by_last), 1, 0.7)
    return by_last[near_last[0]] if near_last else None


def as_toml(value: object) -> str:
    """Return a value as TOML spells it, shortened where it is long."""
    try:
        text = "None" if value is None else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def allowed(model: type[BaseModel], name: str) -> str:
    schema = model.model_json_schema()
    return _words(schema["properties"][name], schema.get("$defs", {}))


def _words(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    if "allowed" in schema:
        return str(schema["allowed"])
    if "$ref" in schema:
        return _words(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in schema:
        *most, last = [_words(option, definitions) for option in schema["anyOf"]]
        return f"{', '.join(most)} or {last}"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if "exclusiveMinimum" in schema:
        return f"a whole number above {schema['exclusiveMinimum']}"
    if "minimum" in schema:
        return f"a whole number from {schema['minimum']}"
    if schema.get("type") == "object" and "properties" in schema:
        return f"a table of {', '.join(schema['properties'])}"
    return _TYPE_WORDS[schema["type"]]


_TYPE_WORDS = {
    "boolean": "true, false",
    "null": "None",
    "number": "a number",
    "object": "a table",
    "string": "text",
}
