"""Decides which Recipe applies: `--set` over code over `--recipe FILE` over auto.

`flatout run` passes its options to the script's process in two environment variables. Nothing else
is read: a Recipe file that merely exists is never used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from flatout.errors import RecipeError
from flatout.recipe.recipe import Recipe, ResolvedRecipe, of_fields
from flatout.recipe.refusal import FieldError
from flatout.recipe.setting import Value
from flatout.recipe.toml import GivenRecipe, as_recipe, load

FILE_VARIABLE = "FLATOUT_RECIPE"
"""Environment variable with the path given to `flatout run --recipe`."""

SET_VARIABLE = "FLATOUT_SET"
"""Environment variable with a JSON list of the settings given to `flatout run --set`."""


def apply(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Return the Recipe with settings such as `compute.precision=bf16` applied in order.

    Numbers, true, false and lists (`[0,1]` or `0,1`) are parsed; any other value is text.

    Raises:
        RecipeError: a setting has no `=`, names an unknown field, or gives it a bad value.
    """
    for setting in settings:
        field, equals, text = setting.partition("=")
        where = f"--set {setting}"
        if not equals:
            raise RecipeError(
                "a setting has no value", where=where, do="write --set section.field=value"
            )
        try:
            recipe = recipe.replace({field.strip(): _value(text.strip())})
        except FieldError as error:
            raise error.at(where) from None
    return recipe


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    is_list = "," in text and not text.startswith("[")
    try:
        return json.loads(f"[{text}]" if is_list else text)
    except ValueError:
        return text


def effective(
    code: GivenRecipe | None = None, *, file: Recipe | ResolvedRecipe | None = None
) -> Recipe:
    """Return the Recipe that applies here: `--set` over code over `--recipe FILE` over auto.

    A field counts as set in a Recipe if it was named there, even with its default.

    Args:
        code: the Recipe given in code, or its path, if any.
        file: used instead of `from_file()` if the caller has read that already. For example, it is
            the `undecided()` of a resolved Recipe of another machine.

    Raises:
        RecipeError: the file or a setting is invalid.
    """
    fields: dict[str, Value] = {}
    for layer in (file or from_file(), as_recipe(code)):
        if isinstance(layer, ResolvedRecipe):
            layer = layer.request()
        if layer is not None:
            fields |= layer.named()
    return apply(of_fields(fields), from_set())


def from_file() -> Recipe | ResolvedRecipe | None:
    """Return the Recipe that `flatout run --recipe` named; None if it named none.

    A resolved Recipe may be that of another machine, which `on_this_machine` checks.

    Raises:
        RecipeError: the file cannot be read or is not a Recipe.
    """
    path = os.environ.get(FILE_VARIABLE)
    return load(path) if path else None


def from_set() -> list[str]:
    """Return the settings that `flatout run --set` gave, in order."""
    text = os.environ.get(SET_VARIABLE)
    if not text:
        return []
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, list) or not all(isinstance(setting, str) for setting in settings):
        raise RecipeError(
            f"{SET_VARIABLE} must be a JSON list of texts, found {text}",
            where="environment",
            do="use flatout run --set section.field=value, which sets it",
        )
    return settings
