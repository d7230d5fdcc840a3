"""Jobs to test with."""

from datetime import datetime

from flatout.submit import Asked, job_of

NOW = datetime(2026, 11, 26, 12, 1)


def job(root, *arguments, script="train.py", text="print('here')\n", **asked):
    """A job of a script, which is written where it is not there."""
    if script.endswith(".py") and not (root / script).exists():
        (root / script).write_text(text)
    given = Asked(script, arguments=arguments, shared=("/",), threads=1, **asked)
    return job_of(given, root, NOW)
