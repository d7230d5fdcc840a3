"""What is put together from step to step; and what stops growing."""

import pytest

from observed import observed

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
    seen = observed(tmp_path, SCRIPT.format(line=line, steps=steps))
    return [item.words for item in seen.growing]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["np.mean(losses)", "losses = losses[-400:]; np.mean(losses)"])
def test_a_history_that_goes_on_growing_is_seen(tmp_path, line):
    assert growing_in(tmp_path, line, 320) == ["numpy.mean"]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["np.mean(losses[-100:])", "torch.tensor(losses[-20:])"])
def test_a_window_of_the_last_stops_growing(tmp_path, line):
    assert growing_in(tmp_path, line, 320) == []
