"""What is said before the first step of a model that is frozen in part."""

import pytest
import torch
from train_jobs import data, network

import flatout


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
    lines = [line for line in said if "the optimizer misses" in line]
    assert len(lines) == (not is_whole)
    assert all("4.weight, 4.bias; they stay" in line for line in lines)
