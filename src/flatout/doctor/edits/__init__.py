"""Cures as changes of the user's own code: run in memory, shown and written."""

from flatout.doctor.edits.memory import install
from flatout.doctor.edits.patch import diff
from flatout.doctor.edits.stored import dump, load
from flatout.doctor.edits.written import Fixed, fix

__all__ = ["Fixed", "diff", "dump", "fix", "install", "load"]
