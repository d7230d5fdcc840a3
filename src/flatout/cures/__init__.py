"""Brings the cures of a Recipe into a script that was written without Flatout.

`python -m flatout.cures.start script.py args` runs a script by the Recipe in FLATOUT_RECIPE and
FLATOUT_SET. Each cure takes hold only where its conditions do; else the script stays as written
there, and that is said once.

install.py hooks what a Recipe asks into the process, before the script runs. A file per cure;
kept features have features.py, cut_features.py for a model that can be cut, kept_samples.py for
the rows. A cure that depends on what the script does in each step watches the first steps as
written.
"""

# Not lazily, or the module would take the place of the function.
from flatout.cures.install import install as install
from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
