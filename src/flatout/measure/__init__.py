"""Measuring: the time of each part of a step, comparisons of A and B, and equality of results.

Modules that need numpy load lazily: a job's CPU and memory limits are read before it starts, when
the import of numpy would only delay it.

timeline.py records a step in nanoseconds, device_lanes.py on a GPU. trial.py compares in
interleaved blocks. machine.py measures the best rates of this machine, roofline.py computes the
least time of a step. live.py writes the file for flatout top, profile.py the file of a run.
"""

from flatout.lazy import attach

# Not lazily, because the submodule would replace the function of the same name.
from flatout.measure.fingerprint import fingerprint as fingerprint

__getattr__, __dir__, __all__ = attach(__name__, __file__)
