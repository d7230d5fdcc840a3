"""Cures as changes of the user's own code: proposed, run in memory, shown and written."""

from flatout.doctor.edits.memory import install
from flatout.doctor.edits.stored import dump, load

__all__ = ["dump", "install", "load"]
