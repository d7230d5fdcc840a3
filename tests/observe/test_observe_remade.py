"""Optimizers that are made again while the same parameters train on; and those that may be."""

import pytest

from observed import observed

START = """
import copy, torch; torch.manual_seed(0)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
x, y = data.tensors

def network():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

def adam(model, rate=1e-3):
    return torch.optim.Adam(filter(lambda item: item.requires_grad, model.parameters()), lr=rate)

def epoch(model, optimizer, batches=loader):
    for rows, classes in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), classes).backward()
        optimizer.step()

model = network()
"""
WRONG = {
    "in each epoch": """
for turn in range(4):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # here
    epoch(model, optimizer)
""",
    "in a function, with another rate": """
def main():
    model = network()
    for turn in range(4):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * 0.9**turn)  # here
        epoch(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
main()
""",
    "of data that are gone in the end": """
def main():
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    batches = DataLoader(data, batch_size=8)
    for turn in range(4):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # here
        epoch(model, optimizer, batches)
main()
""",
    "with a scheduler that holds it": """
for turn in range(4):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # here
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    epoch(model, optimizer)
    schedule.step()
""",
    "in each step": """
for step in range(24):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # here
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.randn(8, 8)), torch.randn(8, 4)).backward()
    optimizer.step()
""",
    "of a table": """
for turn in range(4):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # here
    for rows in torch.randperm(64).split(8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
""",
}
RIGHT = {
    "folds": """
for fold in range(4):
    epoch(network(), adam(network()))
    model = network()
    epoch(model, adam(model))
""",
    "folds that begin again": """
first = copy.deepcopy(model.state_dict())
for fold in range(4):
    model.load_state_dict(first)
    epoch(model, adam(model))
""",
    "folds that are drawn again": """
for fold in range(4):
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    epoch(model, adam(model))
""",
    "stages that unfreeze": """
layers = [network() for _ in range(4)]
deep = nn.Sequential(*(nn.Sequential(one, nn.Linear(4, 8)) for one in layers), nn.Linear(8, 4))
deep.requires_grad_(False)
for stage in (4, 3, 2, 1, 0):
    deep[stage].requires_grad_(True)
    epoch(deep, torch.optim.Adam(deep.parameters(), lr=1e-3))
""",
    "stages of one rate each": """
for rate in (1e-2, 1e-3, 1e-4):
    epoch(model, adam(model, rate))
""",
    "stages of several epochs": """
for stage in range(4):
    optimizer = adam(model)
    for turn in range(2):
        epoch(model, optimizer)
""",
    "tasks": """
tasks = [TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,))) for _ in range(4)]
for task in tasks:
    epoch(model, adam(model), DataLoader(task, batch_size=8))
""",
    "a gan": """
maker, judge = network(), nn.Linear(4, 1)
make, tell = adam(maker), adam(judge)
for step in range(30):
    made = maker(torch.randn(8, 8))
    for optimizer, loss in ((make, -judge(made).mean()), (tell, judge(made.detach()).mean())):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "in turns": """
every = [adam(model) for _ in range(4)]
for turn in range(8):
    epoch(model, every[turn % 4])
""",
    "state that is handed on": """
optimizer = adam(model)
for turn in range(4):
    epoch(model, optimizer)
    known, optimizer = optimizer.state_dict(), adam(model)
    optimizer.load_state_dict(known)
""",
    "state that is taken over": """
optimizer = adam(model)
for turn in range(4):
    epoch(model, optimizer)
    known, optimizer = optimizer.state, adam(model)
    optimizer.state = known
""",
    "clients": """
every = [network() for _ in range(3)]
for turn in range(4):
    for client in every:
        client.load_state_dict(model.state_dict())
        epoch(client, adam(client))
    with torch.no_grad():
        for mean, *parts in zip(model.parameters(), *(one.parameters() for one in every)):
            mean.copy_(sum(parts) / 3)
""",
    "plain": """
for turn in range(4):
    epoch(model, torch.optim.SGD(model.parameters(), lr=0.01))
""",
    "rounds of their own data": """
for turn in range(4):
    optimizer = adam(model)
    for step in range(8):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(8, 8)), torch.randn(8, 4)).backward()
        optimizer.step()
""",
}


def remade_in(tmp_path, source):
    seen = observed(tmp_path, START + source)
    assert seen.steps >= 20
    return seen.remade


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_an_optimizer_that_is_made_again_is_seen(tmp_path, source):
    (found,) = remade_in(tmp_path, source)
    assert "# here" in found.site.code
    assert found.parameters == 4
    each, times = (1, 23) if "range(24)" in source else (8, 3)
    assert (found.each, found.times, found.until) == (each, times, each * times)
    assert found.memory == (10 if "SGD" in source else 1000)


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_optimizers_that_begin_as_they_should_are_not(tmp_path, source):
    assert remade_in(tmp_path, source) == []
