"""Installs the hooks for the cures of a Recipe."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

from flatout.console import first_line
from flatout.cures import record
from flatout.cures.by_field import CURES
from flatout.cures.steps import ScriptSteps
from flatout.hooks import skip_our_frames, when_imported
from flatout.recipe import FIELDS, SETTINGS, Recipe

UNDO = "FLATOUT_UNDO"
"""Environment variable in which `flatout run` passes `cures.start` how to undo a cure, in words."""


def wanted(recipe: Recipe) -> dict[str, Any]:
    """Return the values, by dotted name, that a Recipe sets in a script written without Flatout.

    Fields that are `auto` or as in plain PyTorch leave the script as written. `fp32` and zero
    workers are changes if they are named. In a Recipe that names every field, such as a resolved
    Recipe, they are no changes, since there they mean that nothing was chosen.
    """
    named = recipe.named()
    is_whole = set(FIELDS) - {"process.threads"} <= set(named)
    hooks = {}
    for field, cure in CURES.items():
        value = named.get(field, "auto")
        is_change = value != SETTINGS[field].plain or (cure.of_plain and not is_whole)
        if value != "auto" and is_change:
            hooks[field] = value
    return hooks


def in_words(asked: dict[str, Any]) -> list[str]:
    """Return each cure as users see it: `workers=2`, `bf16`, `channels_last`."""
    return [record.words_of(field, value) for field, value in asked.items()]


def install(recipe: Recipe, then: Callable[[], None] = lambda: None) -> list[str]:
    """Hook the cures of a Recipe into this process, before the script runs.

    Call this once. It does not import torch.

    Args:
        recipe: the settings.
        then: function that is called after the hooks are set.

    Returns:
        The cures that will apply if their conditions hold, in words.
    """
    asked = wanted(recipe)
    record.begin(asked)
    if not asked:
        return []
    atexit.register(record.tell_unmet)
    when_imported("torch", lambda torch: _hook(torch, asked, then))
    when_imported("torch._dynamo.eval_frame", skip_our_frames)
    when_imported("flatout.train.loop", _stand_down)
    return in_words(asked)


def _stand_down(module: Any) -> None:
    record.stand_down(
        "the script trains with Flatout's Trainer or Loop, which take the Recipe themselves: "
        "nothing else in it is changed"
    )


def _hook(torch: Any, asked: dict[str, Any], then: Callable[[], None]) -> None:
    from flatout.cures.self_test import check

    try:
        check(torch)
        _hook_each(torch, asked)
    except Exception as error:
        why = first_line(error)
        record.stand_down(f"nothing is changed: torch {torch.__version__} fails with hooks: {why}")
    else:
        record.hooked()
        then()


def _hook_each(torch: Any, asked: dict[str, Any]) -> None:
    from flatout.cures.roots import Roots

    steps = ScriptSteps(asked)
    steps.watch(torch)
    # Wrappers of a model's calls come first, the innermost wrapper before outer wrappers.
    cures = sorted((CURES[field] for field in asked), key=lambda cure: cure.around or 99)
    functions = {cure.load(): cure.around for cure in cures}
    around = []
    for function, is_around in functions.items():
        made = function(torch, steps)
        if is_around and made is not None:
            around.append(made)
    if around:
        Roots(torch, steps, around)
