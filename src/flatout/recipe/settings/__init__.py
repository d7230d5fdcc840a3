"""The sections of the Recipe, one file each, with their settings."""

from flatout.recipe.settings.compute import Compute
from flatout.recipe.settings.input import Input
from flatout.recipe.settings.memory import Memory
from flatout.recipe.settings.process import Process
from flatout.recipe.settings.save import Save
from flatout.recipe.settings.script import Script
from flatout.recipe.settings.world import World

__all__ = ["Compute", "Input", "Memory", "Process", "Save", "Script", "World"]
