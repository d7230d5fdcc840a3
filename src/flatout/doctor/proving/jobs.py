"""The processes of a trial: the script as it is, or with cures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.devices import environment
from flatout.doctor import edits
from flatout.doctor.proving.cure import Cure
from flatout.doctor.torchrun import under_torchrun
from flatout.doctor.trials.process import Command
from flatout.doctor.trials.start import EDITS, SEED
from flatout.recipe import SET_VARIABLE, Recipe, apply, from_set

_START = ("-m", "flatout.doctor.trials.start")


def job(what: Sequence[str], cure: Cure, folder: Path) -> Command:
    """Return the command that runs a script with a cure."""
    command = under_torchrun(what, _START) or [sys.executable, *_START, *what]
    # Two runs of the script then draw the same numbers and iterate over sets in the same order.
    variables = {SEED: "0", "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
    settings = [f"{name}={_text(value)}" for name, value in cure.recipe.items()]
    if settings:
        variables[SET_VARIABLE] = json.dumps([*from_set(), *settings])
        variables |= environment(apply(Recipe(), settings))
    if cure.own_edits:
        path = folder / f"edits-{len(list(folder.glob('edits-*')))}.json"
        edits.dump(path, cure.own_edits)
        variables[EDITS] = str(path)
    return Command(command, variables)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
