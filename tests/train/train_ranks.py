"""Runs a script as two ranks by `flatout run`."""

import os
import subprocess
import sys


def run_on_two_ranks(folder):
    """Run `train.py` of a folder, with its own cache; returns what came of it."""
    call = "from flatout.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", call, "run", "--devices", "2", "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
    )
