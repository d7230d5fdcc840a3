"""Views of pictures that are bitwise the same; and pictures that may come twice."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(0)
from torch import nn
from torch.nn import functional
pictures = torch.randn(64, 3, 8, 8)

def encoder(*more):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), *more, nn.Linear(288, 16))

def drawn(seed=None):
    if seed is not None:
        torch.manual_seed(seed)
    return pictures[:16] + 0.1 * torch.randn(16, 3, 8, 8)

def agree(one, other):
    return functional.cross_entropy(one @ other.T, torch.arange(len(one)))

def train(model, loss_of, steps=12):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
"""
WRONG = {
    "two calls": """
def loss(model, step):
    one = model(drawn(step))
    return agree(one, model(drawn(step)))  # here
train(encoder(), loss)
""",
    "halves": """
def loss(model, step):
    view = drawn()
    told = model(torch.cat([view, view]))  # here
    return agree(*told.chunk(2))
train(encoder(nn.BatchNorm1d(288)), loss)
""",
}
RIGHT = {
    "views of their own": """
def loss(model, step):
    one, other = model(drawn()), model(drawn())
    return agree(one, other) + agree(*model(torch.cat([drawn(), drawn()])).chunk(2))
train(encoder(), loss)
""",
    "one tensor for two losses": """
def loss(model, step):
    view = drawn()
    return agree(model(view), model(view))
train(encoder(), loss)
""",
    "dropout that makes the views": """
def loss(model, step):
    view = drawn()
    return agree(*model(torch.cat([view, view])).chunk(2))
train(encoder(nn.Dropout(0.5)), loss)
""",
    "pictures that seldom come twice": """
def loss(model, step):
    return agree(model(drawn(step)), model(drawn(step if step == 5 else None)))
train(encoder(), loss)
""",
    "constants": """
def loss(model, step):
    return agree(model(torch.ones(16, 3, 8, 8)), model(torch.ones(16, 3, 8, 8)))
train(encoder(), loss)
""",
    "rows of a table": """
def loss(model, step):
    torch.manual_seed(0)
    one = model(torch.randn(16, 8))
    torch.manual_seed(0)
    return agree(one, model(torch.randn(16, 8)))
train(nn.Linear(8, 16), loss)
""",
    "another label beside it": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = encoder()
    def forward(self, view, scale):
        return self.inner(view) * scale
def loss(model, step):
    return agree(model(drawn(step), 1.0), model(drawn(step), 1.0))
train(Model(), loss)
""",
}


def views_in(tmp_path, source):
    seen = observed(tmp_path, START + source)
    assert seen.steps == 12
    return seen.equal_views


@pytest.mark.slow
@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_views_that_are_equal_are_seen(tmp_path, source):
    (found,) = views_in(tmp_path, source)
    assert (found.samples, found.steps, found.is_batch) == (16, 4, "cat" in source)
    assert "# here" in found.site.code


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_pictures_that_may_come_twice_are_not(tmp_path, source):
    assert views_in(tmp_path, source) == []
