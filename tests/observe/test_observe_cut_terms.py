"""Terms of a loss that end in tensors of their own; and those that parameters belong to."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(0)
from torch import nn
from torch.utils.checkpoint import checkpoint
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
kept = torch.zeros((), requires_grad=True)
trained = torch.zeros((), requires_grad=True)

def train(loss_of, steps=12, more=()):
    optimizer = torch.optim.SGD([*model.parameters(), *more], lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(torch.randn(16, 4)).backward()
        optimizer.step()
"""
WRONG = {
    "numbers": """
def loss(x):
    told = model(x)
    sure = [max(0.0, row.max().item()) for row in told]
    price = torch.tensor(sure, requires_grad=True)  # here
    return told.square().mean() + 0.1 * price.mean()
""",
    "a tensor as it is": """
def loss(x):
    told = model(x)
    sum_ = told.square().mean()
    return sum_ + torch.tensor(told.max().item(), requires_grad=True)  # here
""",
}
RIGHT = {
    "computed": """
def loss(x):
    told = model(x)
    return told.square().mean() + told.max(1).values.clamp(min=0).mean()
""",
    "constants": """
def loss(x):
    told = model(x)
    return torch.tensor(0.0) + told.square().mean() + torch.tensor(told.max().item())
""",
    "a weight that is kept": """
def loss(x):
    return model(x).square().mean() * torch.exp(-kept) + kept
""",
    "weights that are kept, each of its own loss": """
weights = [torch.zeros((), requires_grad=True) for _ in range(2)]
def loss(x):
    one, other = (model(x).square().mean() * torch.exp(-w) + w for w in weights)
    one.backward()
    return other + 0.1 * kept
""",
    "a weight that is stepped": """
def loss(x):
    return model(x).square().mean() * torch.exp(-trained) + trained
""",
    "inputs that need a gradient": """
def loss(x):
    x = torch.tensor(x.tolist(), requires_grad=True)
    told = model(x)
    slope = torch.autograd.grad(told.sum(), x, create_graph=True)[0]
    return slope.square().mean() + (told[:, 0] - x[:, 0]).square().mean()
""",
    "checkpointed": """
def loss(x):
    dummy = torch.ones(1, requires_grad=True)
    told = checkpoint(lambda x, dummy: model(x), x, dummy, use_reentrant=True)
    return told.square().mean() + model(x).mean().square()
""",
}


def cut_in(tmp_path, source):
    seen = observed(tmp_path, START + source + "train(loss, more=[trained])\n")
    assert seen.loss_looks > 3
    return [fact for fact in seen.in_losses if fact.kind == "cut" and fact.count > 2]


@pytest.mark.slow
@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_a_term_that_ends_in_a_new_tensor_is_seen(tmp_path, source):
    (found,) = cut_in(tmp_path, source)
    assert found.count >= 3
    assert "# here" in found.site.code


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_terms_that_parameters_belong_to_are_not(tmp_path, source):
    assert cut_in(tmp_path, source) == []
