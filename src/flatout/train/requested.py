"""The Recipe that holds for a Loop: `--set` over code over `--recipe`."""

from __future__ import annotations

from flatout.measure import fingerprint
from flatout.recipe import Recipe, ResolvedRecipe, effective, from_file


def requested_here(recipe: Recipe | ResolvedRecipe | None) -> tuple[Recipe, list[str]]:
    """What is requested, and what is to be said of it: what another machine measured is left
    open.
    """
    words: list[str] = []
    given, file = (_for_here(item, words) for item in (recipe, from_file()))
    return effective(given, file=file), words


def _for_here(recipe: Recipe | ResolvedRecipe | None, words: list[str]) -> Recipe | None:
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    same, differences = recipe.on_this_machine(fingerprint().as_dict())
    if same:
        return recipe.request()
    words.append(f"the Recipe is from another machine ({'; '.join(differences)}): decided again")
    return recipe.for_other_machine()
