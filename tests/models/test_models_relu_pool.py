"""ReLU behind 2x2 max-pooling as one operator: in a model, and where torch's operators serve."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.kernels import relu_pool as kernel
from flatout.models import find_rewrites, relu_pool

needs_kernel = pytest.mark.skipif(kernel._c is None, reason="the C extension is not built")
LAST = torch.channels_last


@pytest.fixture
def calls(monkeypatch):
    """How often the kernel ran, forward and backward."""
    counts = {"forward": 0, "backward": 0}

    def counted(name):
        function = getattr(kernel, name)

        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    for name in counts:
        monkeypatch.setattr(kernel, name, counted(name))
    return counts


class ByModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 24, 3, padding=1)
        self.act, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(2)

    def forward(self, x):
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        return x * 2


class ByFunctions(ByModules):
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2), stride=2)
        x = torch.max_pool2d(self.conv2(x).relu(), 2)
        return x.mul_(2)


def by_layers():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        nn.MaxPool2d((2, 2), 2),
        nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU()),
        nn.MaxPool2d(2),
    )


KINDS = [ByModules, ByFunctions, by_layers]


def rewritten(model):
    (rewrite,) = find_rewrites(model)
    rewrite.apply()
    return model


def laid_out(model):
    """The strides of channels_last, for the first layer with its one input channel too."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = torch.empty_like(parameter, memory_format=LAST).copy_(parameter)
    return model


def images(count=8):
    torch.manual_seed(0)
    return torch.randn(count, 1, 27, 30).contiguous(memory_format=LAST)


def outcome(model, x, autocast=True):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.float().mul(torch.linspace(0.1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


@needs_kernel
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gives_the_same_bits_by_the_kernel(kind, autocast, calls):
    torch.manual_seed(1)
    model = laid_out(kind())
    plain = outcome(copy.deepcopy(model), images(), autocast)
    ours = outcome(rewritten(model), images(), autocast)
    assert calls == {"forward": 2, "backward": 2}
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_extension_torchs_operators_do_the_same(kind, monkeypatch):
    monkeypatch.setattr(kernel, "_c", None)
    torch.manual_seed(1)
    model = laid_out(kind())
    plain = outcome(copy.deepcopy(model), images())
    ours = outcome(rewritten(model), images())
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def pair(x):
    return relu_pool.relu_pool(x, None, None, False)


def large(shape=(2, 16, 24, 24)):
    torch.manual_seed(2)
    return torch.randn(shape).contiguous(memory_format=LAST).requires_grad_()


@needs_kernel
def test_only_a_byte_a_window_is_kept_for_backward(calls):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        pair(large())
    assert calls["forward"] == 1
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.uint8, 2 * 16 * 12 * 12)]


@needs_kernel
@pytest.mark.parametrize("shape", [(2, 16, 24, 24), (3, 16, 19, 20), (3, 16, 20, 19)])
def test_a_gradient_of_the_gradient(shape, calls):
    found = []
    for function in (pair, lambda x: F.relu(F.max_pool2d(x, 2))):
        x = large(shape)
        y = function(x)
        weight = torch.linspace(-1, 1, y.numel()).reshape(y.shape).requires_grad_()
        (once,) = torch.autograd.grad(y, x, weight, create_graph=True)
        (twice,) = torch.autograd.grad((once**2).sum(), weight)
        found.append((once.detach(), twice))
    assert calls["forward"] == 1
    ours, plain = found
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@needs_kernel
def test_what_is_returned_may_be_written_into(calls):
    x = large()
    y = pair(x)
    y *= 3
    y.sum().backward()
    assert calls == {"forward": 1, "backward": 1}
    assert set(x.grad.unique().tolist()) == {0.0, 3.0}


def test_no_kernel_where_no_gradient_is_wanted(calls):
    pair(large().detach())
    with torch.no_grad():
        pair(large())
    assert calls["forward"] == 0


def test_under_a_transform_torchs_operators_serve(calls):
    x = large().detach()
    gradient = torch.func.grad(lambda x: pair(x).sum())(x)
    mapped = torch.func.vmap(lambda x: pair(x[None])[0])(x)
    assert calls["forward"] == 0
    assert torch.equal(mapped, F.relu(F.max_pool2d(x, 2)))
    assert torch.equal(gradient, torch.func.grad(lambda x: F.max_pool2d(F.relu(x), 2).sum())(x))


def test_a_tracer_sees_torchs_operators(calls):
    traced = torch.jit.trace(pair, large(), check_trace=False)
    assert "max_pool2d" in str(traced.graph)
    assert calls["forward"] == 0


def test_a_compiler_sees_torchs_operators(calls):
    seen = []

    def backend(graph, _inputs):
        seen.append(str(graph.graph))
        return graph

    model = rewritten(laid_out(ByModules()))
    model.compile(backend=backend, fullgraph=True)
    model(images())
    assert calls["forward"] == 0
    assert seen[0].count("functional.max_pool2d") == 2


@needs_kernel
@pytest.mark.parametrize("name", ["act", "pool"])
def test_a_hook_that_comes_later_is_called(name, calls):
    model = rewritten(laid_out(ByModules()))
    plain = model(images())
    assert calls["forward"] == 2
    seen = []
    handle = model.get_submodule(name).register_forward_hook(lambda *_: seen.append(name))
    assert torch.equal(model(images()), plain)
    assert seen == [name, name]
    assert calls["forward"] == 2
    handle.remove()
    model(images())
    assert calls["forward"] == 4


@needs_kernel
def test_a_copy_looks_for_hooks_on_its_own_modules(calls):
    model = rewritten(laid_out(ByModules()))
    twin = copy.deepcopy(model)
    seen = []
    model.act.register_forward_hook(lambda *_: seen.append("model"))
    twin(images())
    assert calls["forward"] == 2
    twin.act.register_forward_hook(lambda *_: seen.append("twin"))
    twin(images())
    # The copied hook is not: it came after the copy was made.
    assert seen == ["twin", "twin"]


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3),
        nn.MaxPool2d(2, 1),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d((2, 1)),
    ],
    ids=str,
)
def test_other_windows_are_torchs(pool, calls):
    model = laid_out(nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), pool))
    plain = outcome(copy.deepcopy(model), images())
    ours = outcome(rewritten(model), images())
    assert calls["forward"] == 0
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
