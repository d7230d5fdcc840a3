import copy
import io
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as every_module

from flatout.models import find_rewrites

pytestmark = pytest.mark.usefixtures("one_thread")


def rewritten(model):
    """The model with all its rewrites made; there must be one."""
    found = find_rewrites(model)
    assert found
    for rewrite in found:
        rewrite.apply()
    return model


def outcome(model, x, *, autocast=None):
    """Output, gradient of the input and of each weight, as bits."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(0)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = model(x)
    # Weights that tell the elements of the output apart.
    y.float().mul(torch.linspace(0.1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def bits(tensor):
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def assert_same_bits(ours, plain):
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b))


def stacked(*, inplace=False, activation=nn.ReLU, pool=None):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        activation(inplace=inplace),
        pool or nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        activation(inplace=inplace),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


class Written(nn.Module):
    """Two pairs, in the way that is asked for."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.act = nn.ReLU()
        self.act_in_place = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)


class WithModules(Written):
    def forward(self, x):
        x = self.pool(self.act(self.conv1(x)))
        return self.pool(self.act_in_place(self.conv2(x)))


class WithFunctions(Written):
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return F.max_pool2d(F.relu(self.conv2(x), inplace=True), (3, 2), stride=1, padding=1)


class WithTorchFunctions(Written):
    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.conv1(x)), 2, 2)
        return torch.max_pool2d(torch.relu_(self.conv2(x)), 3, 2, 1)


class WithMethods(Written):
    def forward(self, x):
        x = F.max_pool2d(self.conv1(x).relu(), 2, ceil_mode=True)
        return F.max_pool2d(self.conv2(x).relu_(), 2, dilation=2)


class WithRelu6(Written):
    def forward(self, x):
        x = F.max_pool2d(F.relu6(self.conv1(x) * 9), 2)
        return self.pool(F.relu6(self.conv2(x), inplace=True))


class InABlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        self.inner = WithFunctions()

    def forward(self, x):
        x = F.max_pool2d(self.block(x), 2)
        return self.inner(x[:, :1])


class WrittenIntoLater(Written):
    """What the pool gives is written into, by an operator, a module and a block of the user's."""

    def __init__(self):
        super().__init__()
        self.late = nn.Sequential(nn.Identity(), nn.Dropout(0.2, inplace=True))
        self.block = InPlace()

    def forward(self, x):
        x = F.max_pool2d(self.act(self.conv1(x)), 2)
        x += 1
        x = self.late(F.max_pool2d(F.relu6(self.conv2(x), inplace=True), 2).flatten(1))
        x = F.max_pool1d(self.act(x * 2), 2)
        return self.block(x)


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class InADimension(nn.Module):
    def __init__(self, dimensions):
        super().__init__()
        self.conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1](1, 3, 3)
        self.pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dimensions - 1](2, ceil_mode=True)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.pool(self.act(self.conv(x)))


MODELS = {
    "sequential": stacked,
    "in place": lambda: stacked(inplace=True),
    "relu6": lambda: stacked(activation=nn.ReLU6),
    "ceil mode": lambda: stacked(pool=nn.MaxPool2d(3, 2, ceil_mode=True)),
    "dilation": lambda: stacked(pool=nn.MaxPool2d(2, 1, dilation=2)),
    "overlapping": lambda: stacked(pool=nn.MaxPool2d(3, 1, padding=1)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()), nn.MaxPool2d(2)),
    "modules": WithModules,
    "functions": WithFunctions,
    "torch functions": WithTorchFunctions,
    "methods": WithMethods,
    "written relu6": WithRelu6,
    "in a block": InABlock,
    "written into later": WrittenIntoLater,
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_bit_identical(name, autocast, layout):
    torch.manual_seed(1)
    model = MODELS[name]().to(memory_format=layout)
    x = torch.randn(3, 1, 21, 21).contiguous(memory_format=layout)
    as_written = copy.deepcopy(model)
    assert_same_bits(
        outcome(rewritten(model), x, autocast=autocast), outcome(as_written, x, autocast=autocast)
    )
    # BatchNorm's statistics are the same too, and the keys are.
    ours, plain = model.state_dict(), as_written.state_dict()
    assert list(ours) == list(plain)
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("dimensions", "dtype"), [(1, torch.float32), (2, torch.float64), (3, torch.bfloat16)]
)
def test_pools_of_all_dimensions(dimensions, dtype):
    torch.manual_seed(2)
    model = InADimension(dimensions).to(dtype)
    x = torch.randn(2, 1, *[9] * dimensions, dtype=dtype)
    plain = outcome(model, x)
    assert_same_bits(outcome(rewritten(model), x), plain)


class Pooled(nn.Module):
    """Only the pair, so that inputs are what the pair sees; times one, to be no one else's."""

    def __init__(self, activation, pool):
        super().__init__()
        self.activation, self.pool = activation, pool

    def forward(self, x):
        return self.pool(self.activation(x * 1))


@given(
    values=st.lists(st.integers(-2, 9), min_size=36, max_size=36),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    ceil=st.booleans(),
    six=st.booleans(),
    last=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=150)
def test_ties_go_to_the_same_element(values, kernel, stride, padding, ceil, six, last, dtype):
    pool = nn.MaxPool2d(kernel, stride, min(padding, kernel // 2), ceil_mode=ceil)
    model = Pooled(nn.ReLU6() if six else nn.ReLU(), pool)
    x = torch.tensor(values, dtype=dtype).reshape(1, 1, 6, 6)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    plain = outcome(model, x)
    assert_same_bits(outcome(rewritten(model), x), plain)


@given(
    values=st.lists(
        st.sampled_from([-1.0, -0.0, 0.0, 1.0, float("nan"), float("inf"), -float("inf")]),
        min_size=16,
        max_size=16,
    ),
    six=st.booleans(),
)
@settings(max_examples=100)
def test_special_values_are_equal_but_for_the_sign_of_zero(values, six):
    model = Pooled(nn.ReLU6() if six else nn.ReLU(), nn.MaxPool2d(2))
    x = torch.tensor(values).reshape(1, 1, 4, 4)
    if six:  # whether its gradient passes a NaN depends, in torch itself, on the tensor's size
        x = x.nan_to_num(2.0)
    plain = outcome(model, x)
    ours = outcome(rewritten(model), x)
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))  # 0.0 equals -0.0


LAYER = st.sampled_from(["conv", "bn", "relu", "relu in place", "relu6", "pool", "pool31", "drop"])


def make(kinds):
    channels = 2
    layers = []
    for kind in kinds:
        layers.append(
            {
                "conv": lambda: nn.Conv2d(channels, channels, 3, padding=1),
                "bn": lambda: nn.BatchNorm2d(channels),
                "relu": nn.ReLU,
                "relu in place": lambda: nn.ReLU(inplace=True),
                "relu6": nn.ReLU6,
                "pool": lambda: nn.MaxPool2d(2, ceil_mode=True),
                "pool31": lambda: nn.MaxPool2d(3, 1, 1),
                "drop": lambda: nn.Dropout(0.3),
            }[kind]()
        )
    # An input that no one writes into in place.
    return nn.Sequential(nn.Conv2d(1, channels, 1), *layers)


class AsWritten(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@given(kinds=st.lists(LAYER, min_size=1, max_size=7), as_written=st.booleans())
@settings(max_examples=60)
def test_random_nets_are_bit_identical(kinds, as_written):
    torch.manual_seed(3)
    model = AsWritten(nn.ModuleList(make(kinds))) if as_written else make(kinds)
    keys = list(model.state_dict())
    x = torch.randn(2, 1, 10, 10)
    statistics = copy.deepcopy(list(model.buffers()))
    try:
        plain = outcome(model, x)
    except RuntimeError:
        reject()  # written in place where autograd needs the value
    after = [b.clone() for b in model.buffers()]
    for buffer, value in zip(model.buffers(), statistics, strict=True):
        buffer.copy_(value)
    undo = [rewrite.apply() for rewrite in find_rewrites(model)]
    # Dropout makes negative zeros, so here 0.0 may stand for -0.0.
    assert all(torch.equal(a, b) for a, b in zip(outcome(model, x), plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), after, strict=True))
    assert list(model.state_dict()) == keys
    for step in reversed(undo):
        step()
    assert not any("forward" in vars(m) for m in model.modules())
    # A pair behind another activation or dropout is left alone: its input may be held by others.
    pairs = sum(
        a.startswith("relu") and b.startswith("pool") and not before.startswith(("relu", "drop"))
        for before, (a, b) in zip(["conv", *kinds], pairwise(kinds), strict=False)
    )
    assert bool(undo) or not pairs or "relu in place" in kinds


# -- nothing is rewritten where ... ----------------------------------------------------------------


class Residual(Written):
    def forward(self, x):
        y = self.act(self.conv1(x))
        return self.pool(y).sum() + y.sum()


class InPlaceResidual(Written):
    def forward(self, x):
        y = self.conv1(x)
        return self.pool(self.act_in_place(y)).sum() + y.sum()


class InPlaceOnAView(Written):
    def forward(self, x):
        y = self.conv1(x)
        z = y[:, :2]
        return self.pool(self.act_in_place(z)).sum() + y.sum()


class InPlaceOnTheInput(Written):
    def forward(self, x):
        return self.pool(self.act_in_place(x))


class ChangedInBetween(Written):
    """What the activation has read is written over before backward."""

    def forward(self, x):
        y = self.conv1(x)
        z = torch.relu(y[:, :2])
        total = y.mul_(0.5).sum((1, 2, 3), keepdim=True)
        return F.max_pool2d(z, 2) + total


class OnTheInput(Written):
    """The caller may write over it before backward."""

    def forward(self, x):
        return self.pool(self.act(x))


class Indices(Written):
    def forward(self, x):
        return F.max_pool2d(F.relu(self.conv1(x)), 2, return_indices=True)


class IndicesByPosition(Written):
    def forward(self, x):
        return F.max_pool2d(F.relu(self.conv1(x)), 2, None, 0, 1, False, True)


class IndicesByName(Written):
    def forward(self, x):
        return F.max_pool2d_with_indices(F.relu(self.conv1(x)), 2)


class WindowsOfPadding(Written):
    def forward(self, x):
        return F.max_pool2d(F.relu(self.conv1(x)), 2, padding=1, dilation=3)


class DataDependent(Written):
    def forward(self, x):
        x = self.act(self.conv1(x))
        if x.mean() > 0:
            x = self.pool(x)
        return x


class WritesToSelf(Written):
    def forward(self, x):
        self.last = self.act(self.conv1(x))
        return self.pool(self.last)


class OtherActivation(Written):
    def forward(self, x):
        return self.pool(F.leaky_relu(self.conv1(x)))


class AveragePool(Written):
    def forward(self, x):
        return F.avg_pool2d(self.act(self.conv1(x)), 2)


class SubclassedActivation(nn.ReLU):
    pass


@pytest.mark.parametrize(
    "model",
    [
        Residual(),
        InPlaceResidual(),
        InPlaceOnAView(),
        InPlaceOnTheInput(),
        OnTheInput(),
        ChangedInBetween(),
        Indices(),
        IndicesByPosition(),
        IndicesByName(),
        WindowsOfPadding(),
        DataDependent(),
        WritesToSelf(),
        OtherActivation(),
        AveragePool(),
        stacked()[:2],
        nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(0, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.MaxPool2d(2, padding=1, dilation=3)),
        nn.Sequential(nn.Conv2d(1, 1, 1), SubclassedActivation(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Dropout(0.1), nn.MaxPool2d(2)),
        nn.MaxPool2d(2),
    ],
    ids=lambda model: type(model).__name__,
)
def test_left_as_it_is(model):
    assert find_rewrites(model) == []


@pytest.mark.parametrize("hooked", ["1", "2"])
@pytest.mark.parametrize(
    "hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_nothing_is_rewritten_where_it_is_hooked(hooked, hook):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    handle = getattr(model.get_submodule(hooked), hook)(lambda *_: None)
    assert find_rewrites(model) == []
    handle.remove()
    assert len(find_rewrites(model)) == 1


def test_a_hook_before_an_in_place_activation_keeps_it_there():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    model[0].register_forward_hook(lambda *_: None)
    assert find_rewrites(model) == []


def test_nothing_is_rewritten_under_a_hook_on_all_modules():
    handle = every_module.register_module_forward_hook(lambda *_: None)
    try:
        assert find_rewrites(stacked()) == []
    finally:
        handle.remove()


def test_hooks_on_blocks_are_still_called():
    model, seen = InABlock(), []
    model.register_forward_hook(lambda *_: seen.append("model"))
    model.block.register_forward_hook(lambda *_: seen.append("block"))
    model.inner.register_forward_hook(lambda *_: seen.append("inner"))
    assert [r.words for r in find_rewrites(model)] == [
        "2 activation(s) in inner moved after max-pooling"
    ]
    rewritten(model)(torch.randn(1, 1, 21, 21))
    assert seen == ["block", "inner", "model"]


def test_a_model_in_evaluation_is_left_alone():
    assert find_rewrites(stacked().eval()) == []


def test_a_part_in_evaluation_is_left_alone():
    model = InABlock()
    model.inner.eval()
    assert [r.words for r in find_rewrites(model)] == [
        "1 activation(s) in InABlock moved after max-pooling"
    ]


# -- around a rewritten model ----------------------------------------------------------------------


def order_of_calls(model, x):
    calls = []
    handles = [
        m.register_forward_hook(lambda m, *_: calls.append(type(m).__name__))
        for m in model.modules()
        if isinstance(m, (nn.ReLU, nn.MaxPool2d))
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize("kind", [stacked, WithModules])
def test_pooling_comes_first_in_training_and_evaluation_runs_as_written(kind):
    model, x = rewritten(kind()), torch.randn(2, 1, 21, 21)
    # The last activation is a function, because the caller may write into what it gives.
    exchanged = ["MaxPool2d", "ReLU", "MaxPool2d"]
    assert order_of_calls(model, x) == exchanged
    model.eval()
    assert order_of_calls(model, x) == ["ReLU", "MaxPool2d"] * 2
    model.train()
    assert order_of_calls(model, x) == exchanged


@pytest.mark.parametrize("kind", [stacked, WithModules, InABlock])
def test_undo_restores_the_code(kind):
    model = kind()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    undo = [rewrite.apply() for rewrite in find_rewrites(model)]
    for step in undo:
        step()
    assert {name: vars(m) for name, m in model.named_modules()} == before


def test_finding_changes_nothing():
    model = InABlock()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    random = torch.get_rng_state()
    assert [r.words for r in find_rewrites(model)] == [
        "1 activation(s) in InABlock moved after max-pooling",
        "2 activation(s) in inner moved after max-pooling",
    ]
    assert {name: vars(m) for name, m in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), random)


class Scaled(Written):
    def __init__(self):
        super().__init__()
        self.scale = 1.0

    def forward(self, x):
        return self.pool(self.act(self.conv1(x))) * self.scale


def test_an_attribute_that_changes_later_is_seen():
    model, x = rewritten(Scaled()), torch.randn(2, 1, 9, 9)
    once = model(x)
    model.scale = 3.0
    assert torch.equal(model(x), once * 3)


def test_keyword_arguments_are_taken_as_before():
    model, x = WithModules(), torch.randn(2, 1, 21, 21)
    written = model(x)
    assert torch.equal(rewritten(model)(x=x), written)


@pytest.mark.parametrize("kind", [stacked, WithModules])
def test_a_copy_of_a_rewritten_model_is_independent(kind):
    model, x = rewritten(kind()), torch.randn(2, 1, 21, 21)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(x).abs().sum() == 0
    assert twin(x).abs().sum() > 0
    twin.eval()
    assert order_of_calls(model, x)[0] == "MaxPool2d"
    assert order_of_calls(twin, x)[0] == "ReLU"


def test_a_pickled_model_has_its_own_forward_again():
    model, x = rewritten(WithModules()), torch.randn(2, 1, 21, 21)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.forward.__func__ is WithModules.forward
    assert torch.equal(loaded(x), model(x))


def test_a_pair_is_found_once():
    block = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.MaxPool2d(2))
    assert len(find_rewrites(nn.Sequential(block, nn.Flatten()))) == 1


class Counts(Written):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        calls = self.calls.add_(1)
        return self.pool(self.act(self.conv1(x))) * calls


def test_a_buffer_that_forward_writes_into():
    model, twin = Counts(), Counts()
    twin.load_state_dict(model.state_dict())
    rewritten(model)
    assert model.calls == 0
    x = torch.randn(1, 1, 9, 9)
    for _ in range(2):
        assert torch.equal(model(x), twin(x))
    assert model.calls == 2


@pytest.mark.slow
def test_a_rewritten_model_can_be_compiled():
    model, x = rewritten(WithModules()), torch.randn(2, 1, 21, 21)
    plain = model(x)
    model.compile(backend="eager")
    assert torch.equal(model(x), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_bit_identical_on_a_gpu(autocast):
    torch.manual_seed(0)
    model, x = stacked().cuda(), torch.randn(4, 1, 21, 21, device="cuda")

    def output():
        torch.manual_seed(0)
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            return model(x)

    plain = output()
    rewritten(model)
    assert torch.equal(output(), plain)
