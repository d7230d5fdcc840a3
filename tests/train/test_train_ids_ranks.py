"""Ids on two ranks: the same rows as on one, and the same weights to rounding."""

import shutil
from pathlib import Path

import pytest
import torch
from train_clicks import fit_day, write_day
from train_ranks import run_on_two_ranks

from flatout.measure import usable_cpus

TRAIN = """
import sys
from pathlib import Path

sys.path.insert(0, {here!r})
from train_clicks import fit_day

fit_day(Path("."), "two", 1, crash=3)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")
def test_a_day_that_begins_on_two_ranks_and_ends_on_one(tmp_path):
    for number in range(2):
        write_day(tmp_path, number)
    fit_day(tmp_path, "one", 0)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    whole = fit_day(tmp_path, "one", 1)
    (tmp_path / "train.py").write_text(TRAIN.format(here=str(Path(__file__).parent)))
    done = run_on_two_ranks(tmp_path)
    assert done.returncode != 0
    assert "RuntimeError: crash" in done.stdout + done.stderr
    said = []
    resumed = fit_day(tmp_path, "two", 1, say=said.append)
    assert any("resumed step 2" in line and "2 -> 1 ranks" in line for line in said)
    assert resumed.signature.ids.digest == whole.signature.ids.digest
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
