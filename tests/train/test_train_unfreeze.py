"""Unfreeze: layers that train from a later epoch on."""

from functools import partial

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import ModelError


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    return flatout.freeze(made, until="3")


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, 6, generator=generator), torch.arange(48) % 3


def fit(epochs, unfreeze, made=None, **more):
    made = model() if made is None else made
    scheduler = more.pop("scheduler", None)
    optimizer = more.pop("optimizer", partial(torch.optim.Adam, lr=0.01))
    run = more.pop("run", None)
    trainer = flatout.Trainer(
        made, loss="cross_entropy", optimizer=optimizer, scheduler=scheduler, run=run, say=len
    )
    history = trainer.fit(
        data(), epochs=epochs, batch_size=16, callbacks=unfreeze, progress=False, **more
    )
    return trainer, history


def moved(before: nn.Module, after: nn.Module) -> set[str]:
    new = after.state_dict()
    return {name for name, old in before.state_dict().items() if not torch.equal(old, new[name])}


def test_layers_train_from_their_epoch_on_and_batch_norm_stays():
    trainer, _ = fit(2, [flatout.Unfreeze(3)])
    assert moved(model(), trainer.objective.model) == {"5.weight", "5.bias"}
    trainer, history = fit(3, [flatout.Unfreeze(3, lr=1e-3)])
    expected = {f"{layer}.{name}" for layer in (0, 3, 5) for name in ("weight", "bias")}
    assert moved(model(), trainer.objective.model) == expected
    assert not trainer.objective.model[1].training
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.01, 1e-3]
    assert "epoch 3: 128 more parameters train at lr 0.001" in history.notes


def test_batch_norm_trains_where_that_is_asked_for():
    trainer, _ = fit(1, [flatout.Unfreeze(1, batch_norm=True)])
    assert "1.running_mean" in moved(model(), trainer.objective.model)


def test_it_is_what_training_with_two_groups_gives():
    trainer, _ = fit(4, [flatout.Unfreeze(3, "3", lr=1e-3)])
    plain = model()
    groups = [{"params": plain[5].parameters()}, {"params": plain[3].parameters(), "lr": 1e-3}]
    optimizer = torch.optim.Adam(groups, lr=0.01)
    fit(2, [], plain, optimizer=optimizer)
    flatout.unfreeze(plain, "3")
    fit(4, [], plain, optimizer=optimizer, initial_epoch=2)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trainer.objective.model.state_dict()[name], value)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resume_in_any_phase_is_bitwise(stop, tmp_path):
    def callbacks():
        return [flatout.Unfreeze(2, "3", lr=1e-3), flatout.Unfreeze(3, "0", lr=1e-4)]

    step = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    whole, _ = fit(4, callbacks(), scheduler=step)

    run = str(tmp_path / "run")
    fit(stop, callbacks(), scheduler=step, run=run)
    again, _ = fit(4, callbacks(), scheduler=step, run=run, resume=True)
    for name, value in whole.objective.model.state_dict().items():
        assert torch.equal(again.objective.model.state_dict()[name], value), name


def test_parameters_that_the_optimizer_held_keep_their_group_without_a_rate():
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    fit(2, [flatout.Unfreeze(2)], made, optimizer=optimizer)
    assert len(optimizer.param_groups) == 1
    assert "0.weight" in moved(model(), made)


def test_what_cannot_be_is_said_before_the_first_step():
    with pytest.raises(ModelError, match="no layer 'nine'"):
        fit(2, [flatout.Unfreeze(2, "nine")])
    with pytest.raises(ModelError, match="from 1"):
        flatout.Unfreeze(0)
    rates = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=[lambda _: 1.0, lambda _: 0.5])
    made = model()
    optimizer = torch.optim.SGD([{"params": [made[5].weight]}, {"params": [made[5].bias]}], lr=0.1)
    with pytest.raises(ModelError, match="a function for each parameter group"):
        fit(2, [flatout.Unfreeze(2, lr=0.1)], made, optimizer=optimizer, scheduler=rates)
