"""What is said before the first step of a model that is frozen in part."""

import pytest
import torch
from train_jobs import data, network, quiet

import flatout


@pytest.mark.slow
@pytest.mark.parametrize("is_safe", [False, True])
def test_a_frozen_batch_norm_that_moves_is_said_once(is_safe):
    model = network()
    if is_safe:
        flatout.freeze(model, layers=["0", "1"])
    else:
        model[:2].requires_grad_(False)
    said = []
    x, y = data()
    flatout.Trainer(model, say=said.append).fit(x, y, epochs=1, progress=False)
    lines = [line for line in said if "frozen BatchNorm" in line]
    assert len(lines) == (not is_safe)
    assert all("in training: 1; flatout.freeze" in line for line in lines)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_new_head_that_the_optimizer_misses_is_said_once(is_whole):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    if not is_whole:
        model[4] = torch.nn.Linear(16, 3)
    said = []
    x, y = data()
    trainer = flatout.Trainer(model, optimizer=optimizer, say=said.append)
    trainer.fit(x, y, epochs=1, progress=False)
    lines = [line for line in said if "but the optimizer does not have them" in line]
    assert len(lines) == (not is_whole)
    assert all("4.weight, 4.bias; they are not trained" in line for line in lines)


class Backboned(torch.nn.Module):
    def __init__(self, gives_gradients):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        self.head = torch.nn.Linear(16, 3)
        self.gives_gradients = gives_gradients

    def forward(self, x):
        with torch.set_grad_enabled(self.gives_gradients == "always"):
            features = self.backbone(x)
        if self.gives_gradients == "in another call":
            features = features + self.backbone(x)
        return self.head(features)


@pytest.mark.parametrize("gives", ["never", "in another call", "always"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_backbone_called_without_gradients_is_said_once(gives, accumulate):
    model = Backboned(gives)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    trainer = flatout.Trainer(model, say=quiet, accumulate=accumulate)
    history = trainer.fit(x, y, epochs=2, progress=False)
    lines = [line for line in history.notes if "without gradients" in line]
    assert len(lines) == (gives == "never")
    assert all("trained: backbone; freeze it with flatout.freeze" in line for line in lines)
