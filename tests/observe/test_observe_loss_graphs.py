"""Accumulated losses of several batches: detection of their division, also with a GradScaler."""

import pytest

from observed import observed

SCRIPT = """
import torch; torch.manual_seed(0)
from torch import nn

model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", enabled={enabled})
x = torch.randn(64, 8)
loader = torch.utils.data.DataLoader([(row, number % 3) for number, row in enumerate(x)], 8)
for epoch in range(6):
    for number, (rows, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(rows), labels) / {parts}
        scaler.scale(loss).backward()
        if number % 4 == 3:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("parts", ["4", "torch.tensor(4.0)"])
def test_losses_that_are_divided_are_no_finding(tmp_path, enabled, parts):
    seen = observed(tmp_path, SCRIPT.format(enabled=enabled, parts=parts))
    assert "undivided" not in {one.kind for one in seen.in_losses}


@pytest.mark.slow
def test_undivided_losses_are_found_with_a_disabled_scaler(tmp_path):
    source = SCRIPT.format(enabled=False, parts=1).replace(" / 1", "")
    seen = observed(tmp_path, source)
    assert "undivided" in {one.kind for one in seen.in_losses}
