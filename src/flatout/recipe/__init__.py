"""The Recipe: every setting that decides how fast a job runs, asked for and resolved."""

from flatout.recipe.overrides import apply, effective, from_file, from_set
from flatout.recipe.parity import ModelFacts, Parity, of_change
from flatout.recipe.recipe import ASKED, Change, Choice, Recipe, ResolvedRecipe
from flatout.recipe.sections import (
    FIELDS,
    PLAIN,
    SECTIONS,
    Compute,
    Input,
    Memory,
    Process,
    Save,
    Script,
    Value,
    World,
)
from flatout.recipe.toml import dump, dumps, load, loads

__all__ = [
    "ASKED",
    "FIELDS",
    "PLAIN",
    "SECTIONS",
    "Change",
    "Choice",
    "Compute",
    "Input",
    "Memory",
    "ModelFacts",
    "Parity",
    "Process",
    "Recipe",
    "ResolvedRecipe",
    "Save",
    "Script",
    "Value",
    "World",
    "apply",
    "dump",
    "dumps",
    "effective",
    "from_file",
    "from_set",
    "load",
    "loads",
    "of_change",
]
