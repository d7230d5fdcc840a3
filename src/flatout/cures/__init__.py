"""Brings the cures of a Recipe into a script that was written without Flatout.

`python -m flatout.cures.start script.py args` runs a script by the Recipe in FLATOUT_RECIPE and
FLATOUT_SET. Each cure takes hold only where its conditions do; else the script stays as written
there, and that is said once.
"""

from flatout.cures.install import install
from flatout.cures.record import applied, is_full, left

__all__ = ["applied", "install", "is_full", "left"]
