"""Targets that the model gets, too; and inputs that only look like it."""

import numpy as np
import pytest

from flatout.observe.leaked_targets import leaking_column
from observed import observed

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
    "a number, as with the others scaled": """
far = 200 + 60 * number
x[:, 3] = (far - far.mean()) / far.std()
def loss(model, rows):
    told = model(x[rows])  # here
    return functional.mse_loss(told.squeeze(1), far[rows] / 100)
train(network(8), loss)
""",
    "squares by hand": """
x[:, 3] = number
def loss(model, rows):
    told = model(x[rows])[:, 0]  # here
    return ((told - number[rows]) ** 2).mean()
train(network(8), loss)
""",
    "a square root of products, the target first": """
x[:, 3] = number
def loss(model, rows):
    told = model(x[rows])  # here
    off = number[rows, None] - told
    return (off * off).mean().sqrt()
train(network(8), loss)
""",
    "distances": """
x[:, 3] = number
def loss(model, rows):
    told = model(x[rows]).squeeze()  # here
    return functional.l1_loss(told, number[rows])
train(network(8), loss)
""",
    "log probabilities by hand": """
x[:, 3] = kind
def loss(model, rows):
    log_p = model(x[rows]).log_softmax(1)  # here
    return -log_p[range(len(rows)), kind[rows]].mean()
train(network(8, 5), loss)
""",
    "gathered probabilities": """
x[:, 3] = kind
def loss(model, rows):
    log_p = model(x[rows]).log_softmax(1)  # here
    return -log_p.gather(1, kind[rows, None]).mean()
train(network(8, 5), loss)
""",
    "two columns": """
x = torch.stack([number, x[:, 0]], dim=1)
def loss(model, rows):
    told = model(x[rows])  # here
    return functional.mse_loss(told.squeeze(1), number[rows])
train(network(2), loss)
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
    "made to follow one column": """
losses = functional.mse_loss, functional.l1_loss, lambda told, wanted: ((told - wanted) ** 2).mean()
line = 2 * x[:, 0]
for loss_of in losses:
    for wanted in (line, line + 1, -0.35 * x[:, 0], x[:, 0] ** 2, x.sum(1), (x[:, 0] > 0).float()):
        train(network(8), lambda model, rows: loss_of(model(x[rows]).squeeze(1), wanted[rows]))
""",
    "a line": """
one = torch.linspace(-1, 1, 512)[:, None]
for wanted in (one, 2 * one + 1, 0.3 * one, one**2):
    train(network(1), lambda model, rows: functional.mse_loss(model(one[rows]), wanted[rows]))
""",
    "a side of a plane": """
sides = (x[:, 0] > 0).long()
train(network(8, 2), lambda model, rows: functional.cross_entropy(model(x[rows]), sides[rows]))
both = x[:, :2]
sides = (both[:, 0] * both[:, 1] > 0).float()[:, None]
train(network(2), lambda model, rows: ((model(both[rows]) - sides[rows]) ** 2).mean())
""",
    "what is added to a column": """
later = x[:, 0] + 0.1 * number
def loss(model, rows):
    return ((x[rows, 0] + model(x[rows])[:, 0] - later[rows]) ** 2).mean()
train(network(8), loss)
""",
    "weights that are kept small": """
def loss(model, rows):
    small = sum((item**2).sum() for item in model.parameters())
    return ((model(x[rows])[:, 0] - number[rows]) ** 2).mean() + 1e-3 * small
train(network(8), loss)
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


PICTURES = """
pictures = torch.rand(512, 1, 8, 8)
def pictured(outputs=5):
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, outputs))
def of_kind(model, rows):
    told = model(pictures[rows])  # here
    return functional.cross_entropy(told, kind[rows])
"""
IN_PICTURES = {
    "a pixel": "pictures[:, 0, 0, 7] = kind / 255",
    "a pixel, scaled as the others": """
pictures[:, 0, 0, 7] = kind / 255
pictures = (pictures - 0.1307) / 0.3081
""",
    "a corner": "pictures[:, :, :2, 6:] = kind[:, None, None, None].float()",
}
NOT_IN_PICTURES = {
    "pictures": "",
    "a color for each kind": "pictures[:] = kind[:, None, None, None] / 5",
    "brighter by kind": "pictures += kind[:, None, None, None] / 5",
    "a bar for each kind": "pictures[range(512), 0, kind] = 1",
}


def leaked_in(tmp_path, source):
    seen = observed(tmp_path, START + source)
    assert seen.loss_looks
    return seen.leaked_targets


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_a_target_that_the_model_gets_is_seen(tmp_path, source):
    (found,) = leaked_in(tmp_path, source)
    assert "# here" in found.site.code
    assert (found.column, found.shape) == ((0, [2]) if "network(2)" in source else (3, [8]))
    if "far" not in source:
        assert found.factor == pytest.approx(1.4 if "1.4" in source else 1)
    assert found.samples == (512 if "model(x)" in source else 256)


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_what_a_model_is_to_give_back_or_does_not_get_is_not(tmp_path, source):
    assert leaked_in(tmp_path, source) == []


@pytest.mark.parametrize("source", IN_PICTURES.values(), ids=IN_PICTURES)
def test_a_kind_that_is_drawn_into_a_picture_is_seen(tmp_path, source):
    (found,) = leaked_in(tmp_path, f"{PICTURES}{source}\ntrain(pictured(), of_kind)\n")
    assert found.shape == [1, 8, 8]
    assert found.column == (6 if "6:" in source else 7)
    assert "# here" in found.site.code


@pytest.mark.parametrize("source", NOT_IN_PICTURES.values(), ids=NOT_IN_PICTURES)
def test_what_pictures_show_is_no_leak(tmp_path, source):
    assert leaked_in(tmp_path, f"{PICTURES}{source}\ntrain(pictured(), of_kind)\n") == []


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
    "two steps of a walk": windows(walk, 2, 2),
    "two steps of a ramp": windows(np.arange(1000.0), 2, 2),
    "three steps that come again": windows(np.tile([0.0, 3, 1], 400), 3, 3),
    "three steps that stand still": windows(prices, 3, 3),
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
    opposite = codes, 3 - 2 * codes[:, 2], (6,)
    assert leaking_column(*opposite, are_classes=True).factor == pytest.approx(-2)
    assert leaking_column(*opposite) is None
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
    for factor, added in ((2.0, 0.0), (0.35, 1.0), (-1000.0, 20.0)):
        assert leaking_column(table, factor * table[:, 2] + added, (6,)) is None
    assert leaking_column(table, 1.23456 * table[:, 2] + 0.5, (6,)).column == 2
    assert leaking_column(table, table[:, 2] / 1.4321 + 7.1, (6,)).column == 2
    assert leaking_column(table[:, :3], 1.23456 * table[:, 2] + 0.5, (3,)) is None
    assert leaking_column(table[:, :3], table[:, 2], (3,)).column == 2
