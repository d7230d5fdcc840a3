"""Generators that are set back to the same seed while training goes on."""

import json
import subprocess
import sys

import pytest

from flatout.observe import Observation

SCRIPT = """
import random
import numpy as np
import torch
from numpy.random import default_rng
from torch import nn

x = torch.randn(48, 3)

def train(begin, evaluate=None):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for rows in torch.as_tensor(begin(epoch)).split(16):
            optimizer.zero_grad()
            model(x[rows]).square().mean().backward()
            optimizer.step()
        if evaluate:
            model.eval()
            with torch.no_grad():
                model(x + evaluate())
            model.train()

def numpys(epoch):
    return np.random.default_rng(0).permutation(48)  # again

def imported(epoch):
    drawn = default_rng(seed=7)  # again
    return drawn.permutation(48)

def of_python(epoch):
    order = list(range(48))
    random.Random(0).shuffle(order)  # again
    return order

def of_all(epoch):
    np.random.seed(3)  # again
    return np.random.permutation(48)

def of_torch(epoch):
    g = torch.Generator()
    g.manual_seed(0)
    return torch.randperm(48, generator=g)  # again

def all_of_torch(epoch):
    torch.manual_seed(1)  # again
    torch.rand(2)
    return range(48)

def by_epoch(epoch):
    g = torch.Generator().manual_seed(epoch)
    np.random.default_rng([0, epoch])
    np.random.default_rng(5 + epoch).permutation(48)
    return torch.randperm(48, generator=g)

def unused(epoch):
    np.random.default_rng(0)
    np.random.seed(0)
    return range(48)

kept = np.random.default_rng(0)

def noise():
    return torch.tensor(np.random.default_rng(0).normal(size=(48, 3)), dtype=torch.float32)

def compared(epoch):
    return kept.permutation(48)

for begin in (numpys, imported, of_python, of_all, of_torch, all_of_torch, by_epoch, unused):
    train(begin)
train(compared, noise)
for rate in range(3):  # the same beginning of several trainings
    random.seed(0)
    torch.manual_seed(0)
    np.random.seed(0)
    order = torch.randperm(48)
    np.random.rand(3), random.random()
    train(lambda epoch: order)
    random.seed(0)
    random.random()
"""


@pytest.mark.slow
def test_what_seeds_alike_in_each_epoch_is_found_and_nothing_else(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "flatout.observe.start", "seen", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))
    assert not [note for note in seen.notes if "failed" in note]
    lines = {at for at, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# again")}
    found = seen.repeated_seeds
    assert {one.site.line: len(one.steps) for one in found} == dict.fromkeys(lines, 3)
    assert {one.kind for one in found} == {
        "numpy.random.default_rng", "numpy.random.seed", "random.Random", "torch.manual_seed",
        "torch.randperm",
    }  # fmt: skip
