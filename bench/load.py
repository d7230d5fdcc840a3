"""Other work on the machine: processes that compute in bursts of random length, as neighbors do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds of a burst and of the pause behind it, at most.
BURST_S, PAUSE_S = 1.0, 1.0
WORK = f"""
import hashlib, random, time
from flatout.processes import die_with_parent
die_with_parent()
data, draw = bytes(2**20), random.Random(SEED)
while True:
    until = time.monotonic() + draw.uniform(0, {BURST_S})
    while time.monotonic() < until:
        hashlib.sha256(data).digest()
    time.sleep(draw.uniform(0, {PAUSE_S}))
"""


@contextmanager
def beside_load(processes: int) -> Iterator[None]:
    """Run what is within beside so many of them; they are gone afterwards."""
    started = [
        subprocess.Popen([sys.executable, "-c", WORK.replace("SEED", str(seed))])
        for seed in range(processes)
    ]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()
