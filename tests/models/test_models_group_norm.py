"""GroupNorm that comes first, or behind what is frozen: torch's channels_last backward crashes."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatout
from flatout.models import guarding_group_norms

plain_group_norm = torch.group_norm


class Groups(nn.Module):
    """Normalizes by the function, beside which there is no module that says so."""

    def __init__(self, groups, channels):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return F.group_norm(x, self.groups, self.weight, self.bias)


def first():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.GroupNorm(1, 3), nn.SiLU(), nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def behind_frozen():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), *first())
    model[0].requires_grad_(False)
    return model


def first_by_function():
    model = first()
    model[0], model[3] = Groups(1, 3), Groups(4, 8)
    return model


def data():
    torch.manual_seed(1)
    return torch.randn(64, 3, 12, 12), torch.randint(0, 4, (64,))


@pytest.mark.parametrize("model", [first, behind_frozen, first_by_function])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fit_in_channels_last_is_the_plain_one_but_for_rounding(model, precision):
    found = []
    for layout in ("contiguous", "channels_last"):
        one, (x, y) = model(), data()
        recipe = flatout.Recipe(compute={"memory_format": layout, "precision": precision})
        trainer = flatout.Trainer(
            one, loss="cross_entropy", optimizer=torch.optim.SGD(one.parameters(), lr=0.1),
            recipe=recipe, say=lambda line: None,
        )  # fmt: skip
        trainer.fit(x, y, batch_size=16, epochs=2, shuffle=False, progress=False)
        found.append([p.detach().contiguous() for p in one.parameters()])
        assert torch.group_norm is plain_group_norm
    most = 1e-5 if precision == "fp32" else 3e-2
    for plain, last in zip(*found, strict=True):
        torch.testing.assert_close(last, plain, rtol=most, atol=most)


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_are_bitwise_those_without_the_guard(affine):
    x, _ = data()
    plain = nn.Sequential(nn.GroupNorm(3, 3, affine=affine), nn.Conv2d(3, 4, 3))
    guarded = copy.deepcopy(plain)
    plain(x).square().sum().backward()
    with guarding_group_norms(nullcontext()):
        with guarding_group_norms(torch.autocast("cpu", enabled=False)):
            output = guarded(x)
        assert torch.group_norm is not plain_group_norm
    assert torch.group_norm is plain_group_norm
    output.square().sum().backward()
    for a, b in zip(plain.parameters(), guarded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert x.grad is None
    assert not x.requires_grad


def test_what_is_frozen_gets_no_graph():
    model = nn.Sequential(nn.GroupNorm(3, 3), nn.Conv2d(3, 4, 3)).requires_grad_(False)
    x, _ = data()
    with guarding_group_norms(nullcontext()):
        assert not model(x).requires_grad
        model.requires_grad_(True)
        with torch.no_grad():
            assert not model(x).requires_grad
