"""Kinds of kills, each once or twice; the thousand are for `bench/kills.py` alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.measure import usable_cpus

BENCH = Path(__file__).parents[2] / "bench"
# What is killed here is killed in its own tests as well: two kinds show that the bench works.
SOME = ["agents", "pieces"]
OTHERS = ["fits", "ranks", "apart_async", "workers", "saves", "caches", "converts"]


@pytest.mark.slow
@pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")
@pytest.mark.parametrize("kinds", [SOME, pytest.param(OTHERS, marks=pytest.mark.long)])
def test_nothing_is_lost_hangs_lives_on_or_is_left(tmp_path, kinds):
    least = len(kinds)
    done = subprocess.run(
        [
            *(sys.executable, str(BENCH / "kills.py"), "--kills", str(least), "--json"),
            *("--only", *kinds),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["keys"]["kills"] >= least
    assert set(found["kinds"]) == set(kinds)
    for kind in found["kinds"].values():
        assert sum(kind["kills"].values()) >= 1
        assert not any(kind[name] for name in ("lost", "hangs", "strays", "leftovers"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_is_lost_makes_the_exit_code_1(tmp_path):
    program = f"""
import sys
sys.path.append({str(BENCH)!r})
import kills
from killed.processes import Lost
from killed.series import Kind

def run(folder, wanted, draw, known, outcome):
    outcome.kills.append("by hand")
    (folder / "temporary").mkdir()
    raise Lost("the weights")

kills.KINDS = {{"made up": Kind("made up", "made up", 1, 1, lambda folder: None, run)}}
sys.argv = ["kills.py", "--kills", "1"]
sys.exit(kills.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "lost: the weights (after ['by hand'])" in done.stderr
