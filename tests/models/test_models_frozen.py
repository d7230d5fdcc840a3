"""A model's two parts give what the whole gives, and only what is frozen is kept."""

import copy
import pickle

import pytest
import torch
from torch import nn

import flatout
from flatout.data import Features
from flatout.models import find_cuts


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.second(self.relu(self.norm(self.first(x)))) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.drop(self.blocks(self.stem(x)).mean((2, 3))))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.words = nn.Embedding(20, 6)
        self.head = nn.Linear(22, 3)

    def forward(self, image, words):
        both = [self.image(image).flatten(1), self.words(words).mean(1)]
        return self.head(torch.cat(both, 1))


def made(kind):
    torch.manual_seed(0)
    return kind()


def pictures(count=6):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def the_same(model, inputs, cut):
    """Outputs and gradients, whole and from features."""
    found = []
    for given in (inputs, cut.prefix(inputs)):
        model.zero_grad()
        torch.manual_seed(5)
        undo = cut.apply()
        parts = given if isinstance(given, tuple) and not isinstance(given, Features) else (given,)
        output = model(*parts)
        undo()
        output.square().sum().backward()
        found.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    whole, parts = found
    return len(whole) == len(parts) and all(map(torch.equal, whole, parts))


def test_a_residual_net_is_cut_behind_its_frozen_block():
    model = flatout.freeze(made(Net), until="blocks.0").train()
    found = find_cuts(model, pictures())
    cut = found.cuts[-1]
    assert "blocks.0" in cut.name
    assert {name.partition(".")[0] for name in cut.tensors} == {"stem", "blocks"}
    assert cut.bytes_per_sample == 8 * 6 * 6 * 4
    assert the_same(model, pictures(), cut)
    assert the_same(model, pictures(9), cut)


def test_two_towers_are_kept_both():
    model = made(Towers)
    model.image.requires_grad_(False)
    model.words.requires_grad_(False)
    inputs = pictures(), torch.randint(0, 20, (6, 5))
    cut = find_cuts(model, inputs).cuts[-1]
    assert cut.bytes_per_sample <= 4 * 22
    assert the_same(model, inputs, cut)


def test_norms_that_act_and_dropout_end_the_frozen_part():
    model = made(Net)
    model.stem.requires_grad_(False)
    model.blocks.requires_grad_(False)
    found = find_cuts(model.train(), pictures())
    assert "norm" in found.hindrance
    assert all("norm" not in name for cut in found.cuts for name in cut.tensors)
    whole = find_cuts(flatout.freeze(model, until="blocks").train(), pictures())
    assert whole.cuts[-1].bytes_per_sample == 8 * 4
    assert not whole.hindrance


class Centered(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_what_depends_on_the_rest_of_the_batch_is_not_kept():
    model = nn.Sequential(nn.Linear(4, 4), Centered(), nn.Linear(4, 2), nn.Linear(2, 2))
    model[:3].requires_grad_(False)
    found = find_cuts(model, torch.randn(8, 4))
    assert all("0." in name for cut in found.cuts for name in cut.tensors)
    assert found.hindrance


@pytest.mark.parametrize("change", ["weight", "buffer", "thawed", "mode"])
def test_a_change_of_the_frozen_part_is_noticed(change):
    model = flatout.freeze(made(Net), until="blocks.0").train()
    cut = find_cuts(model, pictures()).cuts[-1]
    model.head.weight.data += 1
    with torch.no_grad():
        model.head.bias.add_(1)
    assert cut.is_current()
    model.eval()
    assert cut.is_current()
    model.train()
    block = model.blocks[0]
    with torch.no_grad():
        if change == "weight":
            block.first.weight[0, 0, 0, 0] += 1
        elif change == "buffer":
            block.norm.running_mean[3] += 1
        elif change == "thawed":
            block.second.bias.requires_grad_(True)
        else:
            block.norm.training = True
    assert not cut.is_current()


def test_copies_and_pickles_of_a_cut_model_are_whole():
    model = flatout.freeze(made(Net), until="blocks.0").eval()
    undo = find_cuts(model, pictures()).cuts[-1].apply()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(pictures()), model(pictures()))
    undo()
    assert "_call_impl" not in vars(model)
