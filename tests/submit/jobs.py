"""Jobs to test with."""

import json
import time
from datetime import datetime
from pathlib import Path

from flatout.submit import JobOptions, job_of

NOW = datetime(2026, 11, 26, 12, 1)
SMALL_JOB = Path(__file__).parents[1] / "world" / "small_job.py"


def job(root, *arguments, script="train.py", text="print('here')\n", **asked):
    """A job of a script, which is written where it is not there."""
    if script.endswith(".py") and not (root / script).exists():
        (root / script).write_text(text)
    given = JobOptions(script, **{"arguments": arguments, "shared": ("/",), "threads": 1, **asked})
    return job_of(given, root, NOW)


def state_of(flatout, id):
    """What `flatout jobs` says of a job."""
    return json.loads(flatout("jobs", id, "--json"))["jobs"][0]


def until(happened, seconds=90):
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := happened():
            return found
        time.sleep(0.2)
    raise AssertionError(f"it did not happen: {happened}")
