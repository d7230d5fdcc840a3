"""Runs a script with a Recipe: `python -m flatout.cures.start [--rank] [-m] script.py args`.

The Recipe is in FLATOUT_RECIPE and FLATOUT_SET, as `flatout run` sets them. With `--rank` the
script is one of several ranks that `flatout run --devices` has started.
"""

from __future__ import annotations

import os
import sys

from flatout.console import say, say_as_is
from flatout.cures import record
from flatout.cures.install import UNDO, in_words, install, wanted
from flatout.devices import at_start
from flatout.observe import run, show_as_python_does
from flatout.recipe import Recipe, ResolvedRecipe, effective, from_file


def main(arguments: list[str]) -> None:
    """Run a script, or after -m a module, as `python` would."""
    is_rank = arguments[0] == "--rank"
    asked, undo = recipe_here(), os.environ.pop(UNDO, "")
    install(asked, lambda: _say_applied(asked, undo))
    show_as_python_does()
    if is_rank:
        from flatout.world import start

        start.main(arguments[1:], run)
    else:
        run(arguments)


def _say_applied(asked: Recipe, undo: str) -> None:
    """Print the hooked cures; `flatout run` has printed the settings of the process start."""
    done_or_left = {*at_start(asked), *(field for field, _ in record.left())}
    hooked = {field: value for field, value in wanted(asked).items() if field not in done_or_left}
    if hooked and undo and record.is_first_rank():
        say_as_is(f"applied: {' '.join(in_words(hooked))}{undo}")


def recipe_here() -> Recipe:
    """Return the Recipe; of one from another machine, only settings that apply everywhere."""
    recipe = from_file()
    if isinstance(recipe, ResolvedRecipe):
        from flatout.measure import fingerprint

        is_here, differences = recipe.on_this_machine(fingerprint().as_dict())
        if not is_here:
            if "FLATOUT_RUN" not in os.environ:  # otherwise `flatout run` has printed this
                say(f"the Recipe is of another machine ({differences[0]})")
            recipe = recipe.for_other_machine()
    return effective(file=recipe)


if __name__ == "__main__":
    main(sys.argv[1:])
