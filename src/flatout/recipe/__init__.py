"""The Recipe: every setting that decides how fast a job runs, asked for and resolved."""

from flatout.recipe.overrides import apply, effective, from_file, from_set
from flatout.recipe.parity import ModelFacts, Parity
from flatout.recipe.recipe import ASKED, Change, Choice, Recipe, ResolvedRecipe
from flatout.recipe.sections import FIELDS, PLAIN, SECTIONS, SETTINGS, of_change, phrase
from flatout.recipe.setting import Setting, Trial, Value
from flatout.recipe.settings import Compute, Input, Memory, Process, Save, Script, World
from flatout.recipe.toml import dump, dumps, load, loads

__all__ = [
    "ASKED",
    "FIELDS",
    "PLAIN",
    "SECTIONS",
    "SETTINGS",
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
    "Setting",
    "Trial",
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
    "phrase",
]
