"""Unfreeze: layers that train from a later epoch on."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

import flatout
from flatout.errors import ModelError
from flatout.optim import add_late_group
from flatout.train.terms import Terms


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
    given = {name: more.pop(name) for name in ("run", "allow") if name in more}
    trainer = flatout.Trainer(
        made, loss="cross_entropy", optimizer=optimizer, scheduler=scheduler, say=len, **given
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


@pytest.mark.parametrize("batch_norm", [False, True])
def test_batch_norm_that_requires_grad_alone_has_frozen_goes_on_as_it_did(batch_norm):
    """Its statistics move all the time, as in plain PyTorch; that is said again at the thaw."""

    def made():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        found = nn.Sequential(*layers)
        found[:2].requires_grad_(False)
        return found

    plain, ours = made(), made()
    x, y = data()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(9):
        if step == 3:
            plain[0].requires_grad_(True)
            plain[1].requires_grad_(batch_norm)
        at = slice(16 * (step % 3), 16 * (step % 3) + 16)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[at]), y[at]).backward()
        optimizer.step()
    thaw = flatout.Unfreeze(2, batch_norm=batch_norm)
    given = {
        "shuffle": False,
        "allow": "exact",
        "optimizer": torch.optim.SGD(ours.parameters(), 0.1),
    }
    _, history = fit(3, [thaw], ours, **given)
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    said = [note for note in history.notes if "still updates its running statistics" in note]
    assert [note[:45] for note in said] == ["epoch 2: BatchNorm 1 of these layers stays fr"] * (
        not batch_norm
    )


def test_the_step_is_counted_again_at_a_thaw():
    _, before = fit(2, [flatout.Unfreeze(3)])
    _, after = fit(3, [flatout.Unfreeze(3)])
    frozen, thawed = before.roofline, after.roofline
    assert (frozen["step"], thawed["step"]) == (1, 7)
    flops = [counts["lanes"]["backward"]["matmul"]["flops"] for counts in (frozen, thawed)]
    assert flops[1] > 2 * flops[0]
    assert thawed["weights"] != frozen["weights"]


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


SCHEDULES = {
    "one cycle": lambda o, own: lr.OneCycleLR(o, [0.02, own], total_steps=12),
    "three phases": lambda o, own: lr.OneCycleLR(
        o, [0.02, own], epochs=4, steps_per_epoch=3, three_phase=True, div_factor=7.0
    ),
    "cyclic": lambda o, own: lr.CyclicLR(
        o, [0.01, own / 2], [0.02, own], step_size_up=3, cycle_momentum=False
    ),
    "lambda": lambda o, own: lr.LambdaLR(o, lambda step: 1 / (1 + step)),
    "restarts": lambda o, own: lr.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2, eta_min=1e-5),
    "cosine": lambda o, own: lr.CosineAnnealingLR(o, T_max=12, eta_min=1e-4),
    "warmup": lambda o, own: lr.LinearLR(o, start_factor=0.1, total_iters=5),
    "in turn": lambda o, own: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=4), lr.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "chained": lambda o, own: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.5, total_iters=4), lr.MultiplicativeLR(o, lambda step: 0.9)]
    ),
    "averaging": lambda o, own: SWALR(o, swa_lr=0.001, anneal_epochs=5),
}


def by_hand(make, own):
    """A plain loop whose optimizer and schedule have both groups from the start."""
    made = model()
    x, y = data()
    groups = [{"params": list(made[5].parameters())}, {"params": list(made[3].parameters())}]
    groups[1]["lr"] = own
    optimizer = torch.optim.Adam(groups, lr=0.02)
    scheduler = make(optimizer, own)
    rates = []
    for epoch in range(4):
        if epoch == 2:
            flatout.unfreeze(made, "3")
        for start in range(0, 48, 16):
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.zero_grad()
            output = made(x[start : start + 16])
            nn.functional.cross_entropy(output, y[start : start + 16]).backward()
            optimizer.step()
            scheduler.step()
    return made, rates


class Rates(flatout.Callback):
    """What the groups' rates were in each step but the first."""

    def on_fit_start(self, state):
        self.found = [[group["lr"] for group in state.trainer.optimizer.param_groups]]

    def on_step(self, state):
        self.found.append([group["lr"] for group in state.trainer.optimizer.param_groups])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_treats_the_layers_as_if_they_had_been_there_from_the_start(name):
    make, own = SCHEDULES[name], 0.0037
    expected, rates = by_hand(make, own)

    def of_one_group(optimizer):
        first = {lr.OneCycleLR: 0.02, lr.CyclicLR: 0.02}  # the first group's alone
        with pytest.MonkeyPatch.context() as patch:
            for kind in first:
                patch.setattr(lr, kind.__name__, partial(_of_first, kind))
            return make(optimizer, own)

    watch = Rates()
    trainer, _ = fit(
        4,
        [flatout.Unfreeze(3, "3", lr=own), watch],
        optimizer=partial(torch.optim.Adam, lr=0.02),
        scheduler=of_one_group,
        shuffle=False,
        allow="exact",
    )
    assert watch.found[:-1] == rates
    for key, value in expected.state_dict().items():
        assert torch.equal(trainer.objective.model.state_dict()[key], value), key


def _of_first(kind, optimizer, *rates, **options):
    return kind(optimizer, *(rate[0] for rate in rates), **options)


def test_a_later_fit_goes_on_in_the_schedule():
    """The first fit has made steps of it by then."""
    make, own = SCHEDULES["cosine"], 0.0037
    _, rates = by_hand(make, own)
    watch = Rates()
    made = model()
    trainer = flatout.Trainer(
        made,
        optimizer=partial(torch.optim.Adam, lr=0.02),
        scheduler=lambda o: make(o, own),
        say=len,
    )
    options = {"batch_size": 16, "progress": False}
    trainer.fit(data(), epochs=2, **options)
    thaw = flatout.Unfreeze(3, "3", lr=own)
    trainer.fit(data(), epochs=4, initial_epoch=2, callbacks=[thaw, watch], **options)
    assert watch.found[:-1] == rates[6:]


def test_rates_that_somebody_has_set_are_followed_in_their_ratio():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = lr.StepLR(optimizer, 100)
    optimizer.param_groups[0]["lr"] = 0.05
    add_late_group(optimizer, scheduler, [nn.Parameter(torch.ones(1))], 0.01)
    assert optimizer.param_groups[1]["lr"] == 0.005


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


def test_repeated_measurements_do_not_count_in_the_metrics():
    torch.manual_seed(0)
    layers = nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)
    made = nn.Sequential(*layers)
    made[0].requires_grad_(False)
    x, y = torch.randn(640, 8), torch.randint(0, 3, (640,))
    metrics = {"class": lambda outputs, targets: targets.float().mean()}
    trainer = flatout.Trainer(made, metrics=metrics, say=len)
    trainer.terms = Terms(before_share=1e3)  # enough time on a busy machine, too
    thaw = [flatout.Unfreeze(2, "0")]
    history = trainer.fit((x, y), batch_size=16, epochs=4, callbacks=thaw, progress=False)
    assert any("tried once more" in note for note in history.notes)
    assert [logs["class"] for logs in history.epochs] == pytest.approx(
        [float(y.float().mean())] * 4
    )
