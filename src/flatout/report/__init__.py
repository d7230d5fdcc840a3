"""Output of commands: reports in a terminal, and files for other programs.

Not imported here are `page.page` (a doctor's verdict as an HTML file), `chrome_trace.trace` (steps
for ui.perfetto.dev), `baseline.Baseline` and `baseline.compare` (whether a job got worse).

Reports of runs: run.py reads a folder, run_comparison.py judges, run_page.py and pictures.py draw.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
