"""LARS and LAMB against their formulas, written out for one tensor at a time in float64."""

import copy
import math

import pytest
import torch
from torch import nn

from flatout.errors import ModelError
from flatout.optim import Lamb, Lars, Update

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_lars(weights, gradients, *, lr, momentum, weight_decay, trust, everything=False):
    """`gradients`: of each step, by tensor; None where a tensor has none."""
    weights = [w.double().clone() for w in weights]
    velocity = [torch.zeros_like(w) for w in weights]
    for step in gradients:
        for w, v, g in zip(weights, velocity, step, strict=True):
            if g is None:
                continue
            g, local = g.double(), 1.0
            if w.dim() > 1 or everything:
                norm, size = math.sqrt((w * w).sum()), math.sqrt((g * g).sum())
                if norm > 0 and size > 0:
                    local = trust * norm / (size + weight_decay * norm)
                g = g + weight_decay * w
            v.copy_(momentum * v + lr * local * g)
            w -= v
    return weights


def plain_lamb(weights, gradients, *, lr, betas, eps, weight_decay, everything=False):
    b1, b2 = betas
    weights = [w.double().clone() for w in weights]
    means = [torch.zeros_like(w) for w in weights]
    squares = [torch.zeros_like(w) for w in weights]
    counts = [0] * len(weights)
    for step in gradients:
        for i, (w, m, v, g) in enumerate(zip(weights, means, squares, step, strict=True)):
            if g is None:
                continue
            g = g.double()
            counts[i] += 1
            m.copy_(b1 * m + (1 - b1) * g)
            v.copy_(b2 * v + (1 - b2) * g * g)
            u = m / (1 - b1 ** counts[i]) / ((v / (1 - b2 ** counts[i])).sqrt() + eps)
            ratio = 1.0
            if w.dim() > 1 or everything:
                u = u + weight_decay * w
                norm, size = math.sqrt((w * w).sum()), math.sqrt((u * u).sum())
                if norm > 0 and size > 0:
                    ratio = norm / size
            w -= lr * ratio * u
    return weights


LARS = {"lr": 3.0, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.02}
LAMB = {"lr": 0.02, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05}
KINDS = {
    "LARS": (Lars, plain_lars, LARS),
    "LARS, no decay": (Lars, plain_lars, {**LARS, "weight_decay": 0.0}),
    "LARS, no momentum": (Lars, plain_lars, {**LARS, "momentum": 0.0}),
    "LAMB": (Lamb, plain_lamb, LAMB),
    "LAMB, no decay": (Lamb, plain_lamb, {**LAMB, "weight_decay": 0.0}),
}
BOTH = [(Lars, LARS), (Lamb, LAMB)]
SHAPES = [(8, 5), (8,), (4, 3, 2, 2), (4,), (), (1, 7)]


def weights_and_gradients(dtype=torch.float64):
    """Weights of many shapes, and their gradients; one tensor begins late."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=draw, dtype=dtype) for shape in SHAPES]
    gradients: list[list[torch.Tensor | None]] = [
        [torch.randn(shape, generator=draw, dtype=dtype) for shape in SHAPES] for _ in range(6)
    ]
    gradients[0][2] = gradients[1][2] = gradients[3][5] = None
    return weights, gradients


def apply(optimizer, parameters, gradients):
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


def parameters_of(weights):
    return [nn.Parameter(weight.clone()) for weight in weights]


@pytest.mark.parametrize(("kind", "plain", "options"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("everything", [False, True])
def test_as_the_formulas_say(kind, plain, options, everything):
    weights, gradients = weights_and_gradients()
    parameters = parameters_of(weights)
    apply(kind(parameters, **options, adapt_1d=everything), parameters, gradients)
    expected = plain(weights, gradients, **options, everything=everything)
    for found, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), BOTH)
def test_in_less_precision(kind, options, dtype):
    weights, gradients = weights_and_gradients(dtype=dtype)
    parameters = parameters_of(weights)
    apply(kind(parameters, **options), parameters, gradients)
    plain = plain_lars if kind is Lars else plain_lamb
    tolerance = 1e-5 if dtype is torch.float32 else 0.06
    for found, wanted in zip(parameters, plain(weights, gradients, **options), strict=True):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "plain", "options"), KINDS.values(), ids=KINDS)
def test_weights_and_gradients_that_are_zero(kind, plain, options):
    draw = torch.Generator().manual_seed(0)
    some = torch.randn(3, 4, generator=draw, dtype=torch.float64)
    zero = torch.zeros_like(some)
    weights, gradients = [zero, some, zero], [[some, zero, zero], [some, zero, zero]]
    parameters = parameters_of(weights)
    apply(kind(parameters, **options), parameters, gradients)
    for found, wanted in zip(parameters, plain(weights, gradients, **options), strict=True):
        assert found.isfinite().all()
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-12, atol=1e-13)


def test_groups_have_options_of_their_own():
    weights, gradients = weights_and_gradients()
    parameters = parameters_of(weights)
    groups = [
        {"params": parameters[:2], "lr": 1.0, "adapt_1d": True},
        {"params": parameters[2:], "weight_decay": 0.5},
    ]
    apply(Lars(groups, **LARS), parameters, gradients)
    first = [step[:2] for step in gradients]
    other = [step[2:] for step in gradients]
    expected = [
        *plain_lars(weights[:2], first, **{**LARS, "lr": 1.0}, everything=True),
        *plain_lars(weights[2:], other, **{**LARS, "weight_decay": 0.5}),
    ]
    for found, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-12, atol=1e-13)


def state_of(optimizer):
    return [t.clone() for state in optimizer.state.values() for t in state.values()]


def made_bad(step):
    bad = [None if gradient is None else gradient.clone() for gradient in step]
    bad[0].view(-1)[3] = math.nan
    bad[1][2] = math.inf
    return bad


@pytest.mark.parametrize("at", [0, 2], ids=["the first step", "a later step"])
@pytest.mark.parametrize(("kind", "options"), BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bad_step_is_held_back_as_on_a_device(kind, options, dtype, at):
    """The flag says so; weights, averages and counts are as if the step had not been."""
    weights, gradients = weights_and_gradients(dtype=dtype)
    gated, plain = parameters_of(weights), parameters_of(weights)
    held, free = kind(gated, **options), kind(plain, **options)
    for number, step in enumerate(gradients):
        if number == at:
            before, state = [p.detach().clone() for p in gated], state_of(held)
            held.found_inf = torch.tensor(1.0)
            apply(held, gated, [made_bad(step)])
            assert all(map(torch.equal, gated, before))
            after = state_of(held)
            assert all(map(torch.equal, after, state or map(torch.zeros_like, after)))
        held.found_inf = torch.tensor(0.0)
        apply(held, gated, [step])
        apply(free, plain, [step])
    tolerance = 1e-6 if dtype is torch.float32 else 1e-13
    for one, other in zip(gated, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "options"), BOTH)
def test_scaled_gradients_and_loss_scaling(kind, options):
    """`GradScaler` leaves the division by the scale to these optimizers, and skips bad steps."""
    weights, gradients = weights_and_gradients(dtype=torch.float32)
    scaled, plain = parameters_of(weights), parameters_of(weights)
    ours, theirs = kind(scaled, **options), kind(plain, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number, step in enumerate(gradients):
        for bad in (True, False) if number == 3 else (False,):
            factor = scaler.scale(torch.ones(()))
            given = made_bad(step) if bad else step
            for parameter, gradient in zip(scaled, given, strict=True):
                parameter.grad = None if gradient is None else gradient * factor
            scaler.step(ours)
            scaler.update()
        apply(theirs, plain, [step])
    assert scaler.get_scale() == 32.0
    for one, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), BOTH)
@pytest.mark.parametrize("reads", [True, False], ids=["on the host", "on the device"])
def test_an_update_keeps_bad_gradients_away(kind, options, reads, monkeypatch):
    weights, gradients = weights_and_gradients(dtype=torch.float32)
    parameters = parameters_of(weights)
    update = Update(kind(parameters, **options))
    monkeypatch.setattr(update, "_on_cpu", reads)  # what a GPU does can be done here too
    assert update.gated
    for step in (gradients[0], made_bad(gradients[0]), gradients[1]):
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        before = [p.detach().clone() for p in parameters]
        update()
        changed = not all(map(torch.equal, parameters, before))
        assert changed is not update.was_bad()
        update.clear()


@pytest.mark.parametrize(("kind", "options"), BOTH)
def test_going_on_from_a_saved_state(kind, options):
    weights, gradients = weights_and_gradients(dtype=torch.float32)
    through, parameters = parameters_of(weights), parameters_of(weights)
    apply(kind(through, **options), through, gradients)
    first = kind(parameters, **options)
    apply(first, parameters, gradients[:3])
    second = kind(parameters, lr=99.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    apply(second, parameters, gradients[3:])
    assert all(map(torch.equal, through, parameters))


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_a_closure_is_called(kind):
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = kind([weight])

    def closure():
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert not torch.equal(weight, torch.ones(2, 2))


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_sparse_gradients_are_refused(kind):
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{kind.__name__} does not support sparse gradients"):
        kind(table.parameters()).step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Lars, {"lr": -1.0}),
        (Lars, {"momentum": 1.0}),
        (Lars, {"trust": 0.0}),
        (Lars, {"weight_decay": -0.1}),
        (Lamb, {"lr": -1.0}),
        (Lamb, {"betas": (0.9, 1.0)}),
        (Lamb, {"eps": 0.0}),
        (Lamb, {"weight_decay": math.nan}),
    ],
)
def test_options_out_of_range(kind, options):
    with pytest.raises(ModelError, match=r"LA(RS|MB) takes lr >= 0"):
        kind([nn.Parameter(torch.ones(2))], **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), BOTH)
def test_on_a_gpu_as_on_a_cpu_and_a_bad_step_held_back(kind, options):
    weights, gradients = weights_and_gradients(dtype=torch.float32)
    plain = parameters_of(weights)
    apply(kind(plain, **options), plain, gradients)
    parameters = [nn.Parameter(weight.cuda()) for weight in weights]
    optimizer = kind(parameters, **options)
    update = Update(optimizer)
    assert update.gated
    for number, step in enumerate(gradients):
        for given in [made_bad(step), step] if number == 3 else [step]:
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = None if gradient is None else gradient.cuda()
            before = [p.detach().clone() for p in parameters]
            update()
            assert update.was_bad() is all(map(torch.equal, parameters, before))
            update.clear()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for found, wanted in zip(parameters, plain, strict=True):
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-5)
