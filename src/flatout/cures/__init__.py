"""Applies the cures of a Recipe to a script that was written without Flatout.

`python -m flatout.cures.start script.py args` runs a script with the Recipe in FLATOUT_RECIPE and
FLATOUT_SET. Each cure applies only if its conditions hold. Otherwise that part of the script runs
as written, which is reported once.

Before the script runs, install.py hooks the cures that a Recipe asks for into the process. Most
cures have one file. The cure that keeps features of frozen layers has three files: features.py,
cut_features.py for models that can be cut after these layers, and kept_samples.py for storage by
sample. A cure that depends on the actions of each step runs the first steps as written, and
observes them.
"""

# Imported eagerly, since a lazy import would give the module instead of the function.
from flatout.cures.install import install as install
from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
