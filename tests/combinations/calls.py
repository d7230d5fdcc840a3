"""Counts calls of user functions, also in worker processes: a byte in a file for each."""

import os
from collections import Counter
from pathlib import Path


def count(name: str, times: int = 1) -> None:
    """Count calls under a name, in the folder that the environment names."""
    path = f"{os.environ['CALLS']}/{name}"
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.write(file, b"." * times)
    os.close(file)


def counted() -> Counter:
    """How often each name was counted by this rank."""
    return Counter({path.name: path.stat().st_size for path in Path(os.environ["CALLS"]).iterdir()})
