"""Counters of calls of user functions, also in worker processes: a byte in a file for each call."""

import os
from collections import Counter
from pathlib import Path


def count(name: str, times: int = 1) -> None:
    """Count a call under a name, in the folder of the environment variable CALLS."""
    path = f"{os.environ['CALLS']}/{name}"
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.write(file, b"." * times)
    os.close(file)


def counted() -> Counter:
    """Return the number of calls of each name by this rank."""
    return Counter({path.name: path.stat().st_size for path in Path(os.environ["CALLS"]).iterdir()})
