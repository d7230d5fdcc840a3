"""Observation of any script: where its time goes, and what it does that costs time or is a risk.

`python -m flatout.observe.start FOLDER script.py args` runs a script unchanged, and leaves an
Observation of each rank in the folder.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
