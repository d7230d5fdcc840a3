"""Targets that the model gets, too; and inputs that only look like it."""

import json
import os

import numpy as np
import pytest

import forked
from flatout.observe import Observation
from flatout.observe.leaked_targets import leaking_column

START = """
import torch; torch.manual_seed(0)
from torch import nn
from torch.nn import functional

def train(model, loss_of, steps=16):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        rows = torch.randint(0, 512, (32,))
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()

def network(inputs, outputs=1):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))

x, number, kind = torch.randn(512, 8), torch.randn(512), torch.randint(0, 5, (512,))
"""
WRONG = {
    "a number": """
x[:, 3] = number
def loss(model, rows):
    told = model(x[rows])  # here
    return functional.mse_loss(told.squeeze(1), number[rows])
train(network(8), loss)
""",
    "a class, scaled": """
def main():
    x[:, 3] = (kind - 2.0) / 1.4
    def loss(model, rows):
        told = model(x[rows])  # here
        return functional.cross_entropy(told, kind[rows])
    train(network(8, 5), loss)
main()
""",
    "0 or 1": """
truth = (kind > 2).float()
x[:, 3] = truth
def loss(model, rows):
    told = model(x[rows])  # here
    return functional.binary_cross_entropy_with_logits(told, truth[rows, None])
train(network(8), loss)
""",
    "of a full batch": """
x[:, 3] = number
def loss(model, rows):
    told = model(x)  # here
    return functional.huber_loss(told, number[:, None])
train(network(8), loss, 2)
""",
}
RIGHT = {
    "autoencoder": """
def loss(model, rows):
    return functional.mse_loss(model(x[rows]), x[rows])
train(network(8, 8), loss)
""",
    "denoising": """
def loss(model, rows):
    noisy = x[rows] * (torch.rand(32, 8) > 0.1)
    return functional.mse_loss(model(noisy), x[rows])
train(network(8, 8), loss)
""",
    "language": """
text = torch.randint(0, 50, (512, 9))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
    def forward(self, ids):
        return self.head(self.table(ids))
def loss(model, rows):
    told = model(text[rows, :-1])
    return functional.cross_entropy(told.flatten(0, 1), text[rows, 1:].flatten())
train(Model(), loss)
""",
    "the next step of a series": """
series = torch.randn(600).cumsum(0)
def loss(model, rows):
    windows = torch.stack([series[row : row + 9] for row in rows.tolist()])
    return functional.mse_loss(model(windows[:, :8]).squeeze(1), windows[:, 8])
train(network(8), loss)
""",
    "a gan": """
maker, judge = network(8, 8), network(8)
make, tell = (torch.optim.Adam(one.parameters(), lr=1e-3) for one in (maker, judge))
for step in range(16):
    made = maker(x[:32])
    turns = (tell, x[:32], 1.0), (tell, made.detach(), 0.0), (make, made, 1.0)
    for optimizer, rows, truth in turns:
        optimizer.zero_grad()
        functional.mse_loss(judge(rows), torch.full((32, 1), truth)).backward()
        optimizer.step()
""",
    "a condition of a maker": """
maker, judge = network(8, 8), network(8)
hot = functional.pad(kind[:, None].float(), (0, 7))
optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3)
for step in range(16):
    optimizer.zero_grad()
    functional.mse_loss(judge(maker(hot)).squeeze(1), kind.float()).backward()
    optimizer.step()
""",
}


def leaked_in(tmp_path, source):
    (tmp_path / "script.py").write_text(START + source)
    start = ("-m", "flatout.observe.start", tmp_path / "seen", "script.py")
    ran = forked.run(start, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, forked.TORCH)
    assert ran.returncode == 0, ran.stderr
    seen = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))
    assert not [note for note in seen.notes if "a look failed" in note]
    assert seen.loss_looks
    return seen.leaked_targets


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_a_target_that_the_model_gets_is_seen(tmp_path, source):
    (found,) = leaked_in(tmp_path, source)
    assert "# here" in found.site.code
    assert (found.column, found.shape) == (3, [8])
    assert found.factor == pytest.approx(1.4 if "1.4" in source else 1)
    assert found.samples == (512 if "model(x)" in source else 256)


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_what_a_model_is_to_give_back_or_does_not_get_is_not(tmp_path, source):
    assert leaked_in(tmp_path, source) == []


def windows(series, length, target):
    """Of a series, shuffled, and what lies `target` steps after the first of each."""
    begins = np.random.default_rng(0).permutation(len(series) - max(length, target + 1))[:400]
    rows = np.stack([series[at : at + length] for at in begins])
    return rows, series[begins + target], (length,)


drawn = np.random.default_rng(0)
table, codes = drawn.normal(size=(400, 6)), drawn.integers(0, 2, (400, 6)).astype(float)
walk = drawn.normal(size=1000).cumsum()
prices = np.repeat(drawn.normal(size=40), 25)  # which stand still most of the time
SERIES = {
    "walk": windows(walk, 8, 8),
    "ramp": windows(np.arange(1000.0), 8, 8),
    "sine": windows(np.sin(np.arange(1000) / 20), 8, 8),
    "sine that is sampled finely": windows(np.sin(np.arange(1000) / 500), 8, 8),
    "comes again": windows(np.tile(drawn.normal(size=6), 200), 8, 8),
    "comes again as classes": windows(np.tile([0.0, 3, 1, 2, 4, 5], 200), 8, 8),
    "stands still": windows(prices, 8, 8),
}


@pytest.mark.parametrize(("rows", "target", "shape"), SERIES.values(), ids=SERIES)
def test_a_series_whose_next_step_is_asked_for_is_no_leak(rows, target, shape):
    assert leaking_column(rows, target, shape) is None


def test_the_last_step_of_windows_is_one():
    found = leaking_column(*windows(walk, 8, 7))
    assert (found.column, found.factor, found.samples) == (7, 1, 400)
    rows, target, _ = windows(walk, 8, 7)
    wide = np.stack([rows, drawn.normal(size=rows.shape)], axis=2).reshape(400, -1)
    assert leaking_column(wide, target, (8, 2)).column == 14


def test_what_may_be_chance_or_is_no_column_of_its_own_is_none():
    assert leaking_column(codes, codes[:, 2], (6,)).column == 2
    assert leaking_column(codes, 3 - 2 * codes[:, 2], (6,)).factor == pytest.approx(-2)
    # Seldom another than 0, which two columns agree in.
    seldom = (np.arange(400) == 7).astype(float)
    assert leaking_column(np.column_stack([table, seldom]), seldom, (7,)) is None
    assert leaking_column(codes[:24], codes[:24, 2], (6,)) is None
    assert leaking_column(table, np.ones(400), (6,)) is None
    nearly = table[:, 2].copy()
    nearly[:8] = 0
    assert leaking_column(table, nearly, (6,)) is None
    assert leaking_column(table, table[:, 2] + table[:, 3], (6,)) is None
    assert leaking_column(table, table[:, 2] ** 3, (6,)) is None
