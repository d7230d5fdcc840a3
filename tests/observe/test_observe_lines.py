"""Stacks told as lines: the user's, with those above them, and what grows from step to step."""

import json
import os
import subprocess
import sys

import pytest

from flatout.kernels import Clock, stacks_of
from flatout.observe import Observation
from flatout.observe.lines import growth

SCRIPT = """
import torch
from tracker import Tracker

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
tracker = Tracker()

def batch():
    return torch.tensor([[float(i + j) for j in range(16)] for i in range(64)])

for step in range(100000):
    rows = batch()
    loss = model(rows).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tracker.update(loss)
"""

TRACKER = """
import torch

class Tracker:
    def __init__(self):
        self.seen = []

    def update(self, loss):
        self.seen.append(float(loss))
        self.slow(400)

    def slow(self, times):
        for _ in range(times):
            max(range(200))
"""


@pytest.mark.slow
@pytest.mark.skipif(stacks_of(Clock()) is None, reason="this Python's frames cannot be read")
def test_a_slow_logger_and_batches_by_hand_are_told_by_their_lines(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tracker.py").write_text(TRACKER)
    observe = [sys.executable, "-m", "flatout.observe.start", "seen", "--seconds", "3", "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(observe, cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    seen = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))

    assert seen.explained > 0.9
    host = max(seen.lines, key=lambda line: line.lanes_ms.get("host", 0.0))
    assert host.site.code == "max(range(200))"
    assert host.words == "max"
    assert [site.code for site in host.callers] == ["self.slow(400)", "tracker.update(loss)"]
    made = max(seen.lines, key=lambda line: line.lanes_ms.get("input", 0.0))
    assert made.site.code.startswith("return torch.tensor(")
    assert made.callers[0].code == "rows = batch()"
    assert seen.lanes_ms["input"] > 0
    assert any("time of lines that made them" in note for note in seen.notes)
    assert sum(line.ms for line in seen.lines) <= 1.01 * sum(
        ms or 0 for ms in seen.lanes_ms.values()
    )


def test_what_grows_is_told_with_its_interval_and_noise_is_not():
    found = growth([1.0 + 0.2 * at for at in range(12)], 50, 2000)
    assert found.low < found.us < found.high
    assert found.us == pytest.approx(1e3 * 0.2 / 50)
    noise = [0.9, 1.2, 1.0, 1.1, 0.8, 1.3, 1.0, 0.9, 1.2, 1.0, 1.1, 1.2]
    assert growth(noise, 50, 2000) is None
    assert growth([1.0 + 0.01 * at for at in range(12)], 50, 10**6) is None  # it does not matter
    assert growth([1.0 + 0.2 * at for at in range(12)], 50, 20) is None  # too few looks
    assert growth([0.0] * 8, 50, 2000) is None
