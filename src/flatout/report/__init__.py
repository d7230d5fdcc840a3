"""What a terminal shows, and what is read elsewhere.

Not imported here: `page.page`, a doctor's verdict as an HTML file; `chrome_trace.trace`, steps for
ui.perfetto.dev; `baseline.Baseline` and `baseline.compare`, whether a job got worse.

Of runs: run.py reads a folder, run_comparison.py judges, run_page.py and pictures.py draw.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
