"""The numbers guard names the step, the samples and the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import NumbersError
from flatout.train.guard import check_state


class _Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


class _SqrtOfZero(nn.Module):
    """Finite forward, infinite gradient at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + torch.sqrt(self.weight * x[:, :1] * 0)


def fitted(model, x, y, **options):
    trainer = flatout.Trainer(
        model,
        loss="mse",
        lr=0.25,
        optimizer="sgd",
        allow="exact",
        say=lambda line: None,
        **options,
    )
    trainer.fit((x, y), batch_size=8, epochs=1, shuffle=False, progress=False)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_a_nan_in_the_data_names_step_rate_and_sample():
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    x[37, 2] = float("nan")
    model, clean = nn.Linear(4, 1), nn.Linear(4, 1)
    clean.load_state_dict(model.state_dict())
    with pytest.raises(NumbersError) as caught:
        fitted(model, x, y)
    words = str(caught.value)
    assert "step 5" in words
    assert "0.25" in words
    assert "sample 37" in words
    # The weights are those that four good steps give.
    fitted(clean, x[:32], y[:32])
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(clean), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_nan_made_by_a_module_names_the_module():
    model = nn.Sequential(nn.Linear(4, 4), _Log(), nn.Linear(4, 1))
    with pytest.raises(NumbersError, match=r"module 1 \(_Log\)"):
        fitted(model, torch.randn(16, 4), torch.randn(16, 1))


def test_an_infinite_gradient_behind_a_finite_loss_names_the_parameter():
    model = nn.Sequential(nn.Linear(4, 1), _SqrtOfZero())
    before = weights(model)
    with pytest.raises(NumbersError, match=r"1\.weight"):
        fitted(model, torch.randn(16, 4), torch.randn(16, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_every_optimiser_is_gated(optimizer):
    model = nn.Linear(4, 1)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    y[9] = float("inf")
    trainer = flatout.Trainer(
        model, loss="mse", optimizer=optimizer, allow="exact", say=lambda line: None
    )
    with pytest.raises(NumbersError, match="sample 9"):
        trainer.fit((x, y), batch_size=16, progress=False)
    assert all(torch.isfinite(w).all() for w in weights(model))


def test_buffers_are_checked_before_evaluation_and_saving(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].running_var[2] = float("nan")
    trainer = flatout.Trainer(model, loss="mse", say=lambda line: None)
    with pytest.raises(NumbersError, match=r"buffer 1\.running_var"):
        trainer.evaluate((torch.randn(8, 4), torch.randn(8, 1)))
    with pytest.raises(NumbersError, match="saving"):
        trainer.save(tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_many_bad_tensors_are_counted():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    for parameter in model.parameters():
        parameter.data.fill_(float("inf"))
    with pytest.raises(NumbersError, match="and 3 more"):
        check_state(model, "saving")


def test_finite_extremes_pass():
    model = nn.Linear(2, 2)
    model.weight.data.fill_(torch.finfo(torch.float32).max)
    check_state(model, "saving")
