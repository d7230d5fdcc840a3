"""Tests that every bench, run for seconds, ends with figures or reasons and complete JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from idx_files import write

BENCH = Path(__file__).parents[2] / "bench"
# Names of scripts that are part of another bench and have no options of their own.
NO_BENCH = ["delayed_links.py"]
SCRIPTS = sorted(
    file.name
    for file in BENCH.glob("*.py")
    if "__main__" in file.read_text() and file.name not in NO_BENCH
)
# Benches of different kinds: in processes, in turn, with faults. The others take minutes in all.
STARTED_OFTEN = ("breadth.py", "forecast.py", "input.py", "kills.py", "large_batches.py", "soak.py")
ON_CPU = ["--device", "cpu"]
MORE = {
    "breadth_gpu.py": ON_CPU,
    "click_gpu.py": ON_CPU,
    "gpu_profile.py": ON_CPU,
    "large_batches.py": ["--data", "images"],
}


def run(script, *options, folder):
    """Run a bench as a user does, and return the ended process and its JSON."""
    if "--data" in options:
        (folder / "images").mkdir()
        write(folder / "images" / "train-images-idx3-ubyte", np.zeros((8000, 28, 28), np.uint8))
        write(folder / "images" / "train-labels-idx1-ubyte", np.zeros(8000, np.uint8))
    file = folder / "found.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / script), "--json", str(file), *options],
        cwd=folder,
        env={**os.environ, "FLATOUT_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert not file.with_suffix(".json.part").exists()
    return done, json.loads(file.read_text())


def test_all_benches_are_known():
    assert len(SCRIPTS) > 25
    assert not [name for name in (*NO_BENCH, *MORE) if not (BENCH / name).exists()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, marks=[] if script in STARTED_OFTEN else [pytest.mark.long])
        for script in SCRIPTS
    ],
)
def test_a_bench_that_is_short_of_time_shows_figures_and_reasons(script, tmp_path):
    options = [*MORE.get(script, ()), "--quick", "--minutes", "0.05"]
    done, found = run(script, *options, folder=tmp_path)
    assert done.returncode in (0, 1), done.stderr  # 1 where a judged key has no figure
    assert found["quick"] is True
    assert found["keys"]
    for name, key in found["details"].items():
        assert key["value"] is not None or key["note"], name
        assert name in done.stdout
