"""The clock of a training loop, and the hooks that read it several times in each step.

The clock always runs for one of the lanes and keeps the durations of the latest steps. Each hook in
C replaces a hook in Python, and passes on calls that differ from earlier ones to the Python hook.
"""

from __future__ import annotations

from flatout.kernels.missing_extension import MissingExtension

try:
    from flatout.kernels._clock import BackwardHook as BackwardHook
    from flatout.kernels._clock import BatchHook as BatchHook
    from flatout.kernels._clock import Called as Called
    from flatout.kernels._clock import Clock as Clock
    from flatout.kernels._clock import FetchHook as FetchHook
    from flatout.kernels._clock import ForwardHook as ForwardHook
    from flatout.kernels._clock import Loaded as Loaded
    from flatout.kernels._clock import SamplesHook as SamplesHook
    from flatout.kernels._clock import StepHook as StepHook
except ImportError as error:
    raise MissingExtension("_clock") from error

INPUT, COPY, FORWARD, BACKWARD, SYNC, OPTIMIZER, HOST, EVALUATION, SAVING, GC, IDLE = range(11)
# Lane from a backward pass to the next lane. Reports count it as the host's.
AFTER = 11
# Number of single steps whose durations are kept.
KEPT = 20_000
