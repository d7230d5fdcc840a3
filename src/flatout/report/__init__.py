"""What a terminal shows, and what is read elsewhere.

Not imported here: `page.page`, a doctor's verdict as an HTML file; `chrome_trace.trace`, steps for
ui.perfetto.dev; `baseline.Baseline` and `baseline.compare`, whether a job got worse.
"""

from flatout.report.scaling import Scaling
from flatout.report.terminal import Changes, Comparison, Job, Lanes

__all__ = ["Changes", "Comparison", "Job", "Lanes", "Scaling"]
