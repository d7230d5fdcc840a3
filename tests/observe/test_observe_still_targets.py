"""Copies of a model that never move while it trains; and those that may stay as they are."""

import pytest
import torch
from torch import nn

from flatout.observe.still_targets import is_fresh
from observed import observed

START = """
import copy, torch; torch.manual_seed(0)
from torch import nn
from torch.nn import functional

class Values(nn.Sequential):
    pass

def values():
    return Values(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def learn(online, target, after=lambda step: None, steps=24, same=False, of=None):
    optimizer = torch.optim.Adam(of or online.parameters(), lr=1e-3)
    for step in range(steps):
        states, later, rewards = torch.randn(32, 8), torch.randn(32, 8), torch.randn(32)
        with torch.no_grad():
            wanted = rewards + 0.9 * target(states if same else later).max(1).values  # here
        optimizer.zero_grad()
        functional.mse_loss(online(states).max(1).values, wanted).backward()
        optimizer.step()
        after(step)

def see(online, target, predictor, after=lambda step: None):
    both = [*online.parameters(), *(predictor.parameters() if predictor else ())]
    optimizer = torch.optim.Adam(both, lr=1e-3)
    for step in range(24):
        rows = torch.randn(32, 8)
        one, other = (rows + 0.1 * torch.randn(32, 8) for _ in range(2))
        with torch.no_grad():
            first, second = target(one), target(other)  # here
        told = online(one), online(other)
        if predictor:
            told = [predictor(item) for item in told]
        optimizer.zero_grad()
        (functional.mse_loss(told[0], second) + functional.mse_loss(told[1], first)).backward()
        optimizer.step()
        after(step)

online = values()
"""
WRONG = {
    "a copy": "learn(online, copy.deepcopy(online))",
    "loaded once": """
target = values()
target.load_state_dict(online.state_dict())
learn(online, target)
""",
    "in a function, and gone": """
def main():
    online = values()
    learn(online, copy.deepcopy(online).eval())
main()
""",
    "both views": "see(online, copy.deepcopy(online), nn.Linear(4, 4))",
    "moved by nothing": """
target = copy.deepcopy(online)
def after(step):
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), online.parameters()):
            mine.lerp_(theirs, 0.0)
learn(online, target, after)
""",
}
RIGHT = {
    "synced": """
target = copy.deepcopy(online)
def after(step):
    if step == 20:
        target.load_state_dict(online.state_dict())
learn(online, target, after)
""",
    "synced in a function, and gone": """
def main():
    online = values()
    target = copy.deepcopy(online)
    def after(step):
        if step == 20:
            target.load_state_dict(online.state_dict())
    learn(online, target, after)
main()
""",
    "both views, averaged": """
target = copy.deepcopy(online)
def after(step):
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), online.parameters()):
            mine.lerp_(theirs, 0.01)
see(online, target, nn.Linear(4, 4), after)
""",
    "a reference on two batches": "see(online, copy.deepcopy(online), None)",
    "averaged": """
target = copy.deepcopy(online)
def after(step):
    for mine, theirs in zip(target.parameters(), online.parameters()):
        mine.data.mul_(0.99).add_(0.01 * theirs.data)
learn(online, target, after)
""",
    "copied again": """
held = [copy.deepcopy(online)]
def after(step):
    if step == 12:
        held[0] = copy.deepcopy(online)
learn(online, lambda rows: held[0](rows), after)
""",
    "a teacher": "learn(online, values())",
    "a reference": """
learn(online, copy.deepcopy(online), same=True)
""",
    "a task before": """
learn(online, values())
learn(online, copy.deepcopy(online))
""",
    "weights that were loaded": """
with torch.no_grad():
    for item in online.parameters():
        item.add_(0.5 * torch.randn_like(item))
learn(online, copy.deepcopy(online))
""",
}


def still_in(tmp_path, source):
    seen = observed(tmp_path, START + source)
    assert seen.steps >= 24
    return seen.still_targets


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_a_target_that_never_moves_is_seen(tmp_path, source):
    (found,) = still_in(tmp_path, source)
    assert (found.kind, found.steps) == ("__main__.Values", 24)
    assert "# here" in found.site.code


@pytest.mark.parametrize("source", RIGHT.values(), ids=RIGHT)
def test_what_moves_or_is_to_stay_is_not(tmp_path, source):
    assert still_in(tmp_path, source) == []


def test_weights_tell_whether_they_were_ever_trained():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 4))
    nn.init.kaiming_normal_(net[0].weight)
    assert is_fresh(torch, net)
    nn.init.orthogonal_(net[2].weight)
    assert not is_fresh(torch, net)
    nn.init.zeros_(net[2].bias)
    assert is_fresh(torch, net)
    with torch.no_grad():
        net[1].weight.add_(0.01)
    assert not is_fresh(torch, net)
    assert not is_fresh(torch, nn.Sequential(nn.Embedding(4, 4), nn.ReLU()))
