"""Words that are to freeze parameters and do not; and those that do, or mean something else."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(0)
from torch import nn

class Encoder(nn.Linear):
    def __init__(self, trains=True):
        super().__init__(4, 4)
        self.requires_grad = trains  # a flag of its own

def train(model, parameters=None):
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

model, parameters = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), None
"""
WRONG = {
    "parameters": (
        """
for p in model[0].parameters():
    p.require_grad = False  # here
train(model)
""",
        ("require_grad", "", 2, ["0.weight", "0.bias"]),
    ),
    "a module": (
        """
model[1].weight.requires_grad = True
model[0].requires_grad = False  # here
train(model)
""",
        ("requires_grad", "Linear", 2, ["0.weight", "0.bias"]),
    ),
    "a module, misspelt": (
        """
model[0].requires_grads = False  # here
train(model)
""",
        ("requires_grads", "", 2, ["0.weight", "0.bias"]),
    ),
}
RIGHT = {
    "frozen": "model[0].requires_grad_(False)",
    "frozen one by one": "for p in model[0].parameters():\n    p.requires_grad = False",
    "a flag of its own": "model = nn.Sequential(Encoder(False), nn.Linear(4, 2))",
    "not stepped": "model[0].requires_grad = False\nparameters = model[1].parameters()",
    "set to True": "model[0].requires_grad = True\nmodel[0].weight.require_grad = True",
    "frozen as well": "model[0].requires_grad = False\nmodel[0].requires_grad_(False)",
}


def unfrozen_in(tmp_path, source):
    seen = observed(tmp_path, START + source + "\n")
    return seen.unfrozen


@pytest.mark.slow
@pytest.mark.parametrize(("source", "told"), WRONG.values(), ids=WRONG)
def test_what_freezes_nothing_is_seen(tmp_path, source, told):
    (found,) = unfrozen_in(tmp_path, source)
    assert (found.name, found.kind, found.parameters, found.names) == told
    assert found.elements == 20
    assert "# here" in found.site.code


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_what_freezes_or_means_something_else_is_not(tmp_path, source):
    assert unfrozen_in(tmp_path, source + "\ntrain(model, parameters)") == []
