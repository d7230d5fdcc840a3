"""BatchNorm and the ReLU behind it as one operator: equal to rounding, and no trace afterwards."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.kernels import batch_norm as kernel
from flatout.models import find_rewrites, fused_norms_of

if kernel._c is None:
    pytest.skip("the C extension is not built", allow_module_level=True)

SHAPE = (8, 3, 24, 24)


def conv(a=16, b=16):
    return nn.Conv2d(a, b, 3, padding=1, bias=False)


def stacked(act=nn.ReLU):
    return nn.Sequential(conv(3), nn.BatchNorm2d(16), act(), conv(), nn.BatchNorm2d(16))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv1, self.conv2 = conv(3), conv(), conv()
        self.norm0, self.norm1, self.norm2 = (nn.BatchNorm2d(16) for _ in range(3))
        self.down = nn.Sequential(conv(), nn.BatchNorm2d(16))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.act(self.norm0(self.stem(x)))
        y = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.down(x)
        return self.act(y)


class Functional(Residual):
    def forward(self, x):
        x = F.relu6(self.norm0(self.stem(x)))
        y = self.norm1(self.conv1(x)).relu()
        return torch.relu(x + self.norm2(self.conv2(y)))


class Branches(Residual):
    """No graph: each BatchNorm is done alone."""

    def forward(self, x):
        x = F.relu(self.norm0(self.stem(x)))
        if x.dim() == 4:
            x = F.relu(self.norm1(self.conv1(x)))
        return x


class OtherOptions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = conv(3)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(16, affine=False),
            nn.ReLU(),
            nn.BatchNorm2d(16, momentum=None, eps=0.1),
            nn.ReLU6(),
            nn.BatchNorm2d(16, track_running_stats=False),
        )

    def forward(self, x):
        return self.norms(self.conv(x))


MODELS = [stacked, lambda: stacked(nn.ReLU6), Residual, Functional, Branches, OtherOptions]


def fused(model):
    return [rewrite.apply() for rewrite in fused_norms_of(model)]


def made(kind, layout=torch.channels_last):
    torch.manual_seed(0)
    return kind().to(memory_format=layout)


def batch(layout=torch.channels_last, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator).contiguous(memory_format=layout)


def watched(monkeypatch):
    """Counts the calls of the kernel."""
    calls, forward = [], kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *a: calls.append(a[4]) or forward(*a))
    return calls


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_values_gradients_and_running_statistics_to_rounding(kind, layout):
    model = made(kind, layout)
    plain = copy.deepcopy(model).double()
    fused(model)
    keys = list(model.state_dict())
    for seed in range(2):
        x = batch(layout, seed).requires_grad_()
        wide = x.detach().double().requires_grad_()
        result, wanted = model(x), plain(wide)
        torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-4)
        weights = torch.randn_like(result)
        (result * weights).sum().backward()
        (wanted * weights).sum().backward()
        assert_mostly_near(x.grad, wide.grad)
    for ours, one in zip(model.parameters(), plain.parameters(), strict=True):
        if one.grad is not None:
            assert_mostly_near(ours.grad, one.grad)
    assert list(model.state_dict()) == keys == list(plain.state_dict())
    for name, one in plain.named_buffers():
        torch.testing.assert_close(
            model.get_buffer(name).double(), one.double(), rtol=1e-4, atol=1e-5
        )


def assert_mostly_near(ours, plain):
    """An element near zero may fall on the other side of it, and its gradient with it."""
    difference = (ours.double() - plain).norm()
    assert float(difference) <= 1e-3 * float(plain.norm()) + 1e-9


@pytest.mark.parametrize("kind", MODELS)
def test_under_autocast_it_is_as_near_to_the_truth_as_torch(kind):
    model = made(kind)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fused(model)
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        result, wanted = model(x), plain(x)
    assert result.dtype is wanted.dtype
    assert result.stride() == wanted.stride()
    truth, weights = exact(x.double()), torch.randn(result.shape)
    for one in (result, wanted, truth):
        (one * weights).sum().backward()
    triples = [(result, wanted, truth)]
    for ours, torchs, true in zip(*(m.parameters() for m in (model, plain, exact)), strict=True):
        if true.grad is not None:
            assert ours.grad.dtype is torchs.grad.dtype
            triples.append((ours.grad, torchs.grad, true.grad))
    for ours, torchs, true in triples:
        off, torchs_off = (
            float((one.detach().double() - true.detach()).norm()) for one in (ours, torchs)
        )
        assert off <= 1.5 * torchs_off + 1e-3 * float(true.norm())


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (stacked, ["relu", None]),
        (Residual, ["relu", "relu", None, "relu"]),
        (Functional, ["relu6", "relu", "relu"]),
        (Branches, [None, None]),
        (OtherOptions, ["relu", "relu6", None]),
    ],
)
def test_what_the_kernel_does(kind, calls, monkeypatch):
    model, found = made(kind), watched(monkeypatch)
    fused(model)
    model(batch())
    assert found == calls
    model.eval()(batch())
    with torch.no_grad():
        model.train()(batch())
    assert found == calls


@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_runs_as_written(kind):
    model = made(kind)
    plain = copy.deepcopy(model).eval()
    fused(model)
    assert torch.equal(model.eval()(batch()), plain(batch()))


@pytest.mark.parametrize("kind", MODELS)
def test_undo_restores_the_code(kind):
    model = made(kind)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    for _ in range(2):
        for undo in reversed(fused(model)):
            undo()
        assert {name: vars(m) for name, m in model.named_modules()} == before


@pytest.mark.parametrize("kind", [stacked, Residual, Branches])
def test_a_copy_and_a_pickled_model(kind):
    model = made(kind)
    plain = type(model).forward
    fused(model)
    result = model(batch()).detach()
    copied, file = copy.deepcopy(model), io.BytesIO()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    torch.testing.assert_close(copied(batch()), result)
    torch.save(copied, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.forward.__func__ is plain


def test_on_top_of_other_rewrites(monkeypatch):
    model = made(lambda: nn.Sequential(*stacked(), nn.ReLU(), nn.MaxPool2d(2)))
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    plain, calls = copy.deepcopy(model), watched(monkeypatch)
    undo = [rewrite.apply() for rewrite in find_rewrites(model)]
    below = vars(model)["forward"]
    for _ in range(2):
        on_top = fused(model)
        torch.testing.assert_close(model(batch()), plain(batch()), rtol=1e-4, atol=1e-4)
        assert calls == ["relu", None]
        calls.clear()
        plain.load_state_dict(model.state_dict())
        for step in reversed(on_top):
            step()
        assert vars(model)["forward"] == below
    for step in undo:
        step()
    assert {name: vars(m) for name, m in model.named_modules()} == before


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_what_is_hooked_later_is_called(hook, monkeypatch):
    model, calls, found = made(stacked), [], watched(monkeypatch)
    fused(model)
    for part in model[1:3]:
        getattr(part, hook)(lambda m, *_: calls.append(type(m).__name__))
    model(batch()).sum().backward()
    assert sorted(calls) == ["BatchNorm2d", "ReLU"]
    assert found == [None]


@pytest.mark.parametrize("number", [1, 2])
def test_what_is_hooked_is_left_as_it_is(number):
    model = made(stacked)
    model[number].register_forward_hook(lambda *_: None)
    words = [rewrite.words for rewrite in fused_norms_of(model)]
    assert words == [f"{number} BatchNorm by Flatout's kernel"]


class ReadTwice(Residual):
    def forward(self, x):
        x = self.norm0(self.stem(x))
        return x + F.relu(x)


class WrittenLater(Residual):
    def forward(self, x):
        x = self.stem(x)
        y = self.norm0(x)
        z = self.conv1(y.detach()).add_(x.mul_(2.0).detach())
        return F.relu(y + z)


class OtherSum(Residual):
    def forward(self, x):
        y = self.norm0(self.stem(x))
        return F.relu(torch.add(y, x.sum(), alpha=2))


class IntoTheSkip(Residual):
    def forward(self, x):
        x = self.stem(x)
        y = self.conv2(x)
        y += self.norm0(self.conv1(x))
        return F.relu(y)


@pytest.mark.parametrize("kind", [ReadTwice, WrittenLater, OtherSum, IntoTheSkip])
def test_no_pair_where_it_would_not_be_the_same(kind):
    words = [rewrite.words for rewrite in fused_norms_of(made(kind))]
    assert words == ["4 BatchNorm by Flatout's kernel"]


class Normalized(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    "model", [nn.Sequential(Normalized(4)), nn.Sequential(nn.BatchNorm2d(4)).eval(), conv()]
)
def test_other_models_are_left_alone(model):
    assert fused_norms_of(model) == []


def test_a_gradient_of_a_gradient():
    grads = []
    for is_fused in (False, True):
        model = made(Functional)
        if is_fused:
            fused(model)
        x = batch().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, ours in zip(*grads, strict=True):
        assert float((ours - plain).norm()) <= 1e-3 * float(plain.norm()) + 1e-9


def test_frozen_parameters_and_a_skip_without_gradient():
    model = made(Residual)
    for norm in (model.norm1, model.norm2):
        norm.requires_grad_(False)
    model.down.requires_grad_(False)
    plain = copy.deepcopy(model)
    fused(model)
    for one in (model, plain):
        one(batch()).square().mean().backward()
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) is (wanted.grad is None)
        if wanted.grad is not None:
            assert_mostly_near(ours.grad, wanted.grad)


def test_batches_that_do_not_fit_are_torchs():
    model = made(stacked)
    plain = copy.deepcopy(model)
    fused(model)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(model(x), plain(x))
    empty = torch.zeros(0, 3, 4, 4)
    assert model(empty).shape == plain(empty).shape


@pytest.mark.slow
def test_it_can_be_compiled():
    model = made(Residual)
    fused(model)
    plain = model(batch())
    model.compile(backend="eager")
    torch.testing.assert_close(model(batch()), plain, rtol=1e-4, atol=1e-4)
