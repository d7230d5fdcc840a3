"""Cures as edits of the user's code: applied in memory, shown as a diff, or written to files."""

from flatout.doctor.edits.memory import install
from flatout.doctor.edits.patch import diff
from flatout.doctor.edits.stored import dump, load
from flatout.doctor.edits.written import Fixed, fix

__all__ = ["Fixed", "diff", "dump", "fix", "install", "load"]
