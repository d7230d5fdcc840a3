import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from flatout.errors import ModelError
from flatout.models import find_rewrites, recompute_activations

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """A residual block with all that is hard: BatchNorm, dropout, a second argument."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, *, scale=1.0):
        y = torch.relu(self.wide(self.norm(x)))
        return x + scale * self.drop(self.narrow(torch.tanh(y)))


class Stack(nn.Module):
    def __init__(self, width=16, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


class Named(nn.Module):
    """Blocks that are in no list."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(16), Block(16)

    def forward(self, x):
        return self.second(self.first(x))


class CountsByRebinding(nn.Module):
    """Its output depends on a buffer that every forward replaces."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        return torch.tanh(self.linear(x) * self.count)


def flat():
    layers = []
    for _ in range(9):
        layers += [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def flat_in_place():
    layers = []
    for _ in range(5):
        layers += [nn.Linear(16, 16), nn.LeakyReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def spectral():
    blocks = [
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh())
        for _ in range(3)
    ]
    return nn.Sequential(*blocks)


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


MODELS = {
    "blocks in a list": Stack,
    "blocks with names": Named,
    "a flat Sequential": flat,
    "in place": flat_in_place,
    "a Sequential in a Sequential": lambda: nn.Sequential(flat(), nn.ReLU(), nn.Linear(3, 2)),
    "spectral norm": spectral,
    "a buffer that is replaced": lambda: nn.Sequential(*[CountsByRebinding() for _ in range(3)]),
    "a transformer": transformer,
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def trained(model, *, steps=3, autocast=False):
    """Gradients, weights, buffers and the random state after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    gradients = []
    for _ in range(steps):
        x = torch.randn(6, 16)
        x = x[:, None].repeat(1, 4, 1) if isinstance(model, nn.TransformerEncoder) else x
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = model(x).float().square().mean()
        loss.backward()
        gradients += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*gradients, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_bit_identical(name, autocast):
    plain = trained(made(name), autocast=autocast)
    model = made(name)
    keys = list(model.state_dict())
    recompute_activations(model)
    ours = trained(model, autocast=autocast)
    assert list(model.state_dict()) == keys
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def kept_bytes(model, x):
    """Bytes of distinct tensors that autograd keeps between forward and backward."""
    parameters = {p.data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x).sum()
    assert loss.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize(
    ("name", "share"),
    [("blocks in a list", 0.2), ("a flat Sequential", 0.5), ("a transformer", 0.3)],
)
def test_less_is_kept(name, share):
    model = made(name)
    x = torch.randn(256, 4, 16) if name == "a transformer" else torch.randn(1024, 16)
    plain = kept_bytes(model, x)
    recompute_activations(model)
    assert kept_bytes(model, x) < share * plain


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x))


def test_blocks_run_a_second_time_only_in_training():
    model = nn.Sequential(*[Counted() for _ in range(3)])
    recompute_activations(model)
    model(torch.ones(2, 4)).sum().backward()
    assert [m.calls for m in model] == [2, 2, 2]
    model.eval()
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model.train()(torch.ones(2, 4))
    assert [m.calls for m in model] == [4, 4, 4]


def test_gradients_that_torch_func_takes_within_a_forward_are_those_without():
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    model = copy.deepcopy(plain)
    recompute_activations(model)
    x = torch.randn(3, 4)
    for one in (plain, model):
        per_sample = torch.func.vmap(torch.func.grad(lambda v, one=one: one(v).sum()))
        (one(x).sum() + per_sample(x).pow(2).sum()).backward()
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(theirs.grad, ours.grad)


class CountsInPlace(CountsByRebinding):
    def forward(self, x):
        count = self.count.add_(1).clone()
        return torch.tanh(self.linear(x) * count)


@pytest.mark.parametrize("kind", [CountsByRebinding, CountsInPlace])
def test_a_second_backward_sees_the_same_buffers(kind):
    model = nn.Sequential(kind(), kind())
    recompute_activations(model)
    loss = model(torch.ones(3, 16)).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), once, strict=True))
    assert [m.count.item() for m in model] == [1, 1]


@pytest.mark.parametrize("kind", [CountsByRebinding, CountsInPlace])
def test_buffers_of_later_forwards_are_kept(kind):
    model = nn.Sequential(kind(), kind())
    recompute_activations(model)
    losses = [model(torch.ones(3, 16)).sum() for _ in range(3)]
    buffers = list(model.buffers())
    for loss in losses:
        loss.backward()
    assert all(a is b for a, b in zip(model.buffers(), buffers, strict=True))
    assert [m.count.item() for m in model] == [3, 3]


@pytest.mark.parametrize("name", MODELS)
def test_undo(name):
    model = made(name)
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    recompute_activations(model)()
    assert {n: vars(m) for n, m in model.named_modules()} == before


def test_a_forward_that_somebody_replaced_is_left_alone():
    model = Stack()
    own = model.blocks[0].forward = lambda x, scale: x
    undo = recompute_activations(model)
    assert model.blocks[0].forward is own
    undo()
    assert model.blocks[0].forward is own


def test_parts_that_are_scripted_or_compiled_are_left_alone():
    parts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    scripted = torch.jit.script(parts[1])
    compiled = torch.compile(parts[2], backend="eager")
    model = nn.Sequential(parts[0], scripted, compiled, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    before = {name for name, part in model.named_modules() if "forward" in vars(part)}
    recompute_activations(model)
    now = {name for name, part in model.named_modules() if "forward" in vars(part)}
    assert now - before == {"0", "3"}
    model(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_copy_is_independent_and_a_pickle_is_plain():
    model = Stack()
    recompute_activations(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin(torch.randn(4, 16)).abs().sum() > 0
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.blocks[0].forward.__func__ is Block.forward


def test_without_blocks_it_says_so():
    class OneLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

    with pytest.raises(ModelError, match="no blocks of layers in OneLayer") as caught:
        recompute_activations(OneLayer())
    assert "nn.ModuleList" in str(caught.value)


def test_rewrites_leave_recomputed_parts_alone():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten()
    )
    assert len(find_rewrites(model)) == 1
    undo = recompute_activations(model)
    assert find_rewrites(model) == []
    undo()
    assert len(find_rewrites(model)) == 1
