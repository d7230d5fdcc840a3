"""What a terminal shows."""

from flatout.report.scaling import Scaling
from flatout.report.terminal import Changes, Comparison, Job, Lanes

__all__ = ["Changes", "Comparison", "Job", "Lanes", "Scaling"]
