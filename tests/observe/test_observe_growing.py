"""What is put together from step to step; and what stops growing."""

import json
import os

import pytest

import forked
from flatout.observe import Observation

SCRIPT = """
import numpy as np, torch
from torch import nn
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range({steps}):
    optimizer.zero_grad()
    loss = model(torch.randn(32, 8)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    {line}
"""


def growing_in(tmp_path, line, steps):
    (tmp_path / "script.py").write_text(SCRIPT.format(line=line, steps=steps))
    start = ("-m", "flatout.observe.start", tmp_path / "seen", "script.py")
    ran = forked.run(start, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, forked.TORCH)
    assert ran.returncode == 0, ran.stderr
    seen = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))
    assert not [note for note in seen.notes if "a look failed" in note]
    return [item.words for item in seen.growing]


@pytest.mark.parametrize("line", ["np.mean(losses)", "losses = losses[-400:]; np.mean(losses)"])
def test_a_history_that_goes_on_growing_is_seen(tmp_path, line):
    assert growing_in(tmp_path, line, 320) == ["numpy.mean"]


@pytest.mark.parametrize("line", ["np.mean(losses[-100:])", "torch.tensor(losses[-20:])"])
def test_a_window_of_the_last_stops_growing(tmp_path, line):
    assert growing_in(tmp_path, line, 320) == []
