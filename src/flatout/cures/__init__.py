"""Brings the cures of a Recipe into a script that was written without Flatout.

`python -m flatout.cures.start script.py args` runs a script by the Recipe in FLATOUT_RECIPE and
FLATOUT_SET. Each cure takes hold only where its conditions do; else the script stays as written
there, and that is said once.
"""

# Not lazily, or the module would take the place of the function.
from flatout.cures.install import install as install
from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
