"""A week of daily training that is killed and resumed on several ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.kernels import table_rows

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")
def test_a_week_that_was_killed_is_the_undisturbed_week_on_other_ranks_too(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "scripts_week_on_ranks.py", tmp_path, "7", "3"],
        capture_output=True,
        text=True,
        timeout=200,
        env={
            **os.environ,
            "PYTHONPATH": str(HERE.parent / "train"),
            "FLATOUT_CACHE": str(tmp_path / "cache"),
        },
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["killed"]["same"] >= 3
    assert result["killed"]["other"] >= 4
    assert result["far"] <= 1e-5
