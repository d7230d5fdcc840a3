import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.errors import ModelError
from flatout.optim import Update, can_fuse, fuse

pytestmark = pytest.mark.usefixtures("one_thread")


OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adam decay maximize": (
        torch.optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1, "maximize": True},
    ),
    "adam decoupled": (
        torch.optim.Adam,
        {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    "adamw amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adam with lr tensor": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True},
    ),
}
OTHERS = {
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "adagrad fused": (torch.optim.Adagrad, {"lr": 0.01, "fused": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
    "adam foreach": (torch.optim.Adam, {"foreach": True}),
    "adam capturable off": (torch.optim.Adam, {"foreach": False}),
}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).to(dtype)


def backward(model, seed):
    draw = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, 1, 4, 4, generator=draw).to(dtype)
    (model(x) * torch.randn(5, 2, generator=draw).to(dtype)).square().mean().backward()


def numbers(model, optimizer):
    """All weights and all of the optimizer's state."""
    state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return [*(p.detach() for p in model.parameters()), *state]


def assert_equal(ours, plain):
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def pair(kind, options, *, fused=False, groups=False, dtype=torch.float32):
    """Two equal jobs: (model, optimizer) twice."""
    jobs = []
    for _ in range(2):
        model = network(dtype)
        parameters = list(model.parameters())
        given = parameters
        if groups:
            given = [
                {"params": parameters[:1], "lr": 0.003},
                {"params": parameters[1:], "weight_decay": 0.2},
            ]
        optimizer = kind(given, **copy.deepcopy(options))
        if fused:
            fuse(optimizer)
        jobs.append((model, optimizer))
    return jobs


@pytest.mark.parametrize(
    ("groups", "dtype"),
    [(False, torch.float32), (True, torch.float32), (True, torch.float64), (False, torch.bfloat16)],
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_step_and_zero_grad(name, fused, groups, dtype):
    kind, options = OPTIMIZERS[name]
    fused = fused and can_fuse(kind(network(dtype).parameters(), **options))
    (model, optimizer), (plain, stepped) = pair(
        kind, options, fused=fused, groups=groups, dtype=dtype
    )
    update = Update(optimizer)
    for step in range(6):
        backward(model, step)
        backward(plain, step)
        update()
        stepped.step()
        stepped.zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert_equal(numbers(model, optimizer), numbers(plain, stepped))
    assert not update.was_bad()
    # The short way is taken where it may be, or this would not test it.
    takes_kernels = fused and name != "adam with lr tensor"
    assert (update.parts[0].direct is not None) == takes_kernels


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_step_themselves(name):
    (model, optimizer), (plain, stepped) = pair(*OTHERS[name])
    update = Update(optimizer)
    for step in range(4):
        backward(model, step)
        backward(plain, step)
        update()
        stepped.step()
        stepped.zero_grad()
    assert_equal(numbers(model, optimizer), numbers(plain, stepped))
    assert update.parts[0].direct is None


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ModelError, match="LBFGS evaluates the loss several times") as caught:
        Update(torch.optim.LBFGS(network().parameters()))
    assert "Adam" in caught.value.do


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("kind", ["adamw", "sgd momentum"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_rate_and_momentum(name, kind):
    jobs = pair(*OPTIMIZERS[kind], fused=True, groups=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [SCHEDULERS[name](optimizer) for _, optimizer in jobs]
        (model, optimizer), (plain, stepped) = jobs
        update = Update(optimizer)
        for step in range(8):
            backward(model, step)
            backward(plain, step)
            update()
            stepped.step()
            stepped.zero_grad()
            for schedule in schedules:
                schedule.step()
    assert update.parts[0].direct is not None
    assert_equal(numbers(model, optimizer), numbers(plain, stepped))


def test_a_scheduler_that_comes_later_sees_the_steps():
    (model, optimizer), _ = pair(*OPTIMIZERS["adam"], fused=True)
    update = Update(optimizer)
    for step in range(3):
        backward(model, step)
        update()
    assert update.parts[0].direct is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = lr_scheduler.StepLR(optimizer, 1)
        backward(model, 3)
        update()
        schedule.step()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["adam", "sgd momentum"])
@given(without=st.lists(st.integers(0, 3), max_size=3), start=st.integers(0, 3))
@settings(max_examples=10)
def test_parameters_without_gradient(name, fused, without, start):
    (model, optimizer), (plain, stepped) = pair(*OPTIMIZERS[name], fused=fused)
    update = Update(optimizer)
    # The plain job is never fused here: torch's fused SGD fails where a momentum begins late.
    for group in stepped.param_groups:
        group["fused"] = None
    for step in range(6):
        for job in (model, plain):
            backward(job, step)
            if step >= start:
                for number in without:
                    list(job.parameters())[number].grad = None
            elif step % 2:
                for parameter in job.parameters():
                    parameter.grad = None
        update()
        stepped.step()
        stepped.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_momentum_that_begins_late_under_a_fused_sgd():
    (model, optimizer), (plain, stepped) = pair(*OPTIMIZERS["sgd momentum"], fused=True)
    for group in stepped.param_groups:
        group["fused"] = None
    update = Update(optimizer)
    for step in range(4):
        for job in (model, plain):
            backward(job, step)
            if step < 2:
                job[3].weight.grad = None
        update()
        stepped.step()
        stepped.zero_grad()
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    assert len([s for s in optimizer.state.values() if s.get("momentum_buffer") is not None]) == 4
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def embedding_job():
    torch.manual_seed(0)
    return nn.Embedding(10, 3, sparse=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "kind", [torch.optim.SparseAdam, lambda p: torch.optim.SGD(p, lr=0.1), torch.optim.Adagrad]
)
def test_sparse_gradients(kind):
    ours, plain = embedding_job(), embedding_job()
    optimizer, stepped = kind(ours.parameters()), kind(plain.parameters())
    update = Update(optimizer)
    for step in range(3):
        for job in (ours, plain):
            job(torch.tensor([1, 1, step + 2])).square().sum().backward()
        update()
        stepped.step()
        stepped.zero_grad()
    assert torch.equal(ours.weight, plain.weight)
    kept = ours.weight.clone()
    (ours(torch.tensor([4, 4])) * torch.tensor([[1.0], [float("nan")]])).sum().backward()
    update()
    assert update.was_bad()
    assert torch.equal(ours.weight, kept)


def test_complex_parameters():
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    update = Update(torch.optim.Adam([weight], lr=0.1))
    weight.grad = torch.ones(3, dtype=torch.complex64)
    update()
    assert not torch.equal(weight, torch.ones(3, dtype=torch.complex64))
    kept = weight.detach().clone()
    weight.grad = torch.tensor([1, 1, complex(0, float("nan"))], dtype=torch.complex64)
    update()
    assert update.was_bad()
    assert torch.equal(weight, kept)


def test_several_dtypes():
    wide, narrow = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([wide, narrow], lr=0.1)
    fuse(optimizer)
    update = Update(optimizer)
    for _ in range(3):
        wide.grad, narrow.grad = torch.ones_like(wide), torch.ones_like(narrow)
        update()
    torch.testing.assert_close(wide.float(), narrow)
    kept = wide.detach().clone()
    wide.grad, narrow.grad = torch.ones_like(wide), torch.tensor([1.0, float("inf")])
    update()
    assert update.was_bad()
    assert torch.equal(wide, kept)


# -- the gate --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "bad"), [(0, float("nan")), (1, float("inf")), (4, -float("inf"))]
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "rmsprop"])
def test_a_bad_step_is_held_back(name, fused, when, bad):
    kind, options = {**OPTIMIZERS, **OTHERS}[name]
    (model, optimizer), _ = pair(kind, options, fused=fused and name != "rmsprop")
    update = Update(optimizer)
    assert update.gated
    for step in range(when):
        backward(model, step)
        update()
    kept = [t.clone() for t in numbers(model, optimizer)]
    backward(model, when)
    model[0].weight.grad[1, 0, 0, 1] = bad
    update()
    assert update.was_bad()
    assert_equal(numbers(model, optimizer), kept)
    assert all(p.grad is None for p in model.parameters())
    # All later steps are held back as well, until the flag is cleared.
    backward(model, 9)
    update()
    assert_equal(numbers(model, optimizer), kept)
    update.clear()
    assert not update.was_bad()
    backward(model, 9)
    update()
    assert not torch.equal(model[0].weight, kept[0])


def test_a_bad_step_stays_known_when_the_optimizer_is_looked_at_again():
    (model, optimizer), _ = pair(*OPTIMIZERS["adam"])
    update = Update(optimizer)
    backward(model, 0)
    model[0].bias.grad.fill_(float("nan"))
    update()
    update.refresh()
    assert update.was_bad()


# -- clipping --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("norm", "value"), [(0.1, None), (None, 0.01), (0.5, 0.02), (1e9, None), (None, 1e9)]
)
def test_clipping_is_torchs(fused, norm, value):
    (model, optimizer), (plain, stepped) = pair(*OPTIMIZERS["sgd momentum"], fused=fused)
    update = Update(optimizer, clip_norm=norm, clip_value=value)
    for step in range(4):
        backward(model, step)
        backward(plain, step)
        update()
        if norm is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), norm)
        if value is not None:
            nn.utils.clip_grad_value_(plain.parameters(), value)
        stepped.step()
        stepped.zero_grad()
    assert_equal(numbers(model, optimizer), numbers(plain, stepped))


@pytest.mark.parametrize("clip", [{"clip_norm": 1.0}, {"clip_value": 1.0}])
def test_clipping_does_not_hide_a_nan(clip):
    (model, optimizer), _ = pair(*OPTIMIZERS["adam"])
    update = Update(optimizer, **clip)
    backward(model, 0)
    model[0].weight.grad.fill_(float("nan"))
    kept = [p.detach().clone() for p in model.parameters()]
    update()
    assert update.was_bad()
    assert_equal([p.detach() for p in model.parameters()], kept)


# -- an optimizer that someone watches or changes -------------------------------------------------


def run(model, update, steps, start=0):
    for step in range(start, start + steps):
        backward(model, step)
        update()


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_of_the_optimizer_are_called(fused):
    (model, optimizer), (plain, stepped) = pair(*OPTIMIZERS["adam"], fused=fused)
    update, calls = Update(optimizer), []
    run(model, update, 2)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    run(model, update, 2, 2)
    assert calls == ["before", "after"] * 2
    for handle in handles:
        handle.remove()
    run(model, update, 2, 4)
    assert len(calls) == 4
    for step in range(6):
        backward(plain, step)
        stepped.step()
        stepped.zero_grad()
    assert_equal(numbers(model, optimizer), numbers(plain, stepped))


def test_hooks_of_all_optimizers_are_called():
    (model, optimizer), _ = pair(*OPTIMIZERS["adam"], fused=True)
    update, calls = Update(optimizer), []
    run(model, update, 2)
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        run(model, update, 2)
    finally:
        handle.remove()
    assert calls == [1, 1]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("patched_at", [0, 3])
def test_a_patched_step_is_called(patched_at, scheduled):
    (model, optimizer), _ = pair(*OPTIMIZERS["adam"], fused=True)
    update, calls = Update(optimizer), []
    run(model, update, patched_at)
    step = optimizer.step

    def patched(self, *args, **kwargs):
        calls.append(1)
        return step(*args, **kwargs)

    optimizer.step = patched.__get__(optimizer)
    if scheduled:
        lr_scheduler.StepLR(optimizer, 5)
    run(model, update, 3)
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("refresh", [False, True])
@pytest.mark.parametrize("name", ["adam", "sgd momentum"])
def test_a_loaded_state_is_used(name, refresh):
    (model, optimizer), (plain, stepped) = pair(*OPTIMIZERS[name], fused=True)
    update = Update(optimizer)
    run(model, update, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run(model, update, 3, 3)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if refresh:
        update.refresh()
    run(model, update, 3, 3)
    for step in range(6):
        backward(plain, step)
        stepped.step()
        stepped.zero_grad()
    assert_equal(numbers(model, optimizer), numbers(plain, stepped))


def test_a_state_that_is_cleared_starts_over():
    (model, optimizer), (plain, stepped) = pair(*OPTIMIZERS["adam"], fused=True)
    update = Update(optimizer)
    run(model, update, 3)
    for step in range(3):
        backward(plain, step)
        stepped.step()
        stepped.zero_grad()
    optimizer.state.clear()
    stepped.state.clear()
    run(model, update, 2, 3)
    for step in range(3, 5):
        backward(plain, step)
        stepped.step()
        stepped.zero_grad()
    assert_equal(numbers(model, optimizer), numbers(plain, stepped))


def test_parameters_that_are_added_later():
    model = network()
    update = Update(torch.optim.Adam(model[0].parameters(), lr=0.1))
    run(model, update, 2)
    model.zero_grad()
    before = model[3].weight.detach().clone()
    update.parts[0].optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.01})
    run(model, update, 1)
    assert not torch.equal(model[3].weight, before)
    assert model[3].weight.grad is None


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd momentum"])
def test_channels_last_parameters(name):
    """Fused after the memory format changed: equal to the plain result up to rounding."""
    (model, optimizer), (plain, stepped) = pair(*OPTIMIZERS[name])
    # Two input channels, so that the two formats differ.
    for job, its in ((model, optimizer), (plain, stepped)):
        torch.manual_seed(1)
        job[0] = nn.Conv2d(2, 3, 2)
        its.param_groups[0]["params"][:2] = job[0].parameters()

    def gradients(job, step):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(4, 2, 4, 4, generator=draw)
        job(x).square().mean().backward()

    update = Update(optimizer)
    for step in range(6):
        if step == 3:
            model.to(memory_format=torch.channels_last)
            assert not model[0].weight.is_contiguous()
            fuse(optimizer)
            update.refresh()
        gradients(model, step)
        gradients(plain, step)
        update()
        stepped.step()
        stepped.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # What someone loads in another format is put into order as well.
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            state[key] = value.contiguous()
    optimizer.load_state_dict(saved)
    gradients(model, 7)
    gradients(plain, 7)
    update()
    stepped.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adam", "adamw amsgrad", "sgd momentum"])
def test_a_bad_step_is_held_back_on_a_gpu_without_waiting(name):
    kind, options = OPTIMIZERS[name]
    model = network().cuda()
    optimizer = kind(model.parameters(), **options)
    fuse(optimizer)
    update = Update(optimizer)

    def gradients(bad=False):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if bad else 0.1)

    for _ in range(3):
        gradients()
        update()
    kept = [t.clone() for t in numbers(model, optimizer)]
    gradients(bad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert update.was_bad()
    assert_equal(numbers(model, optimizer), kept)
