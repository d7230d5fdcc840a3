"""Contains each Python process of a trial: Python imports this file at start, through PYTHONPATH.

It also runs the next sitecustomize on the path, which it hides.
"""

import importlib.machinery
import importlib.util
import os
import sys

try:
    from flatout.doctor.trials.contained import begin

    begin()
except Exception as error:
    # A Python without Flatout may go on if the kernel itself contains the process.
    if '"is_redirected": true' in os.environ.get("FLATOUT_TRIAL", ""):
        print(f"flatout: this process cannot be contained: {error!r}", file=sys.stderr, flush=True)
        os._exit(70)
_here = __file__.rpartition("/")[0]
_next = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [folder for folder in sys.path if folder.rstrip("/") != _here]
)
if _next is not None and _next.loader is not None:
    _module = importlib.util.module_from_spec(_next)
    _next.loader.exec_module(_module)
