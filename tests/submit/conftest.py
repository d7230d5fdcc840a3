"""A SLURM cluster and two hosts are shared with the tests of the world."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "world"))


@pytest.fixture(autouse=True)
def _own_ledger(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
