"""Measuring: where a step's time went, whether B beats A, and whether the result is the same.

What needs numpy loads lazily: a job's CPU and memory limits are read before it starts, when the
import of numpy would only delay it.

timeline.py records a step in nanoseconds, device_lanes.py on a GPU. trial.py compares in
interleaved blocks. machine.py measures the best rates of this machine, roofline.py what a step
takes at least. live.py writes what flatout top reads, profile.py what a run leaves.
"""

from flatout.lazy import attach

# Not lazily, or the module would take the place of the function.
from flatout.measure.fingerprint import fingerprint as fingerprint

__getattr__, __dir__, __all__ = attach(__name__, __file__)
