"""What a look at a batch changes outside of weights is put back, wherever a user keeps it."""

import array
import collections
import dataclasses
import functools
import random
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

from flatout import Trainer
from flatout.train.held_state import HeldState
from flatout.train.snapshot import Snapshot, untouched

CALLS = 0
SIZES = []


def of_a_global(x):
    global CALLS
    CALLS += 1
    SIZES.append(len(x))
    return CALLS, [*SIZES]


def of_an_attribute(x):
    of_an_attribute.calls = getattr(of_an_attribute, "calls", 0) + 1
    return of_an_attribute.calls


def of_a_default(x, seen=[]):  # noqa: B006
    seen.append(len(x))
    return [*seen]


def of_a_cell():
    calls, latest = 0, None

    def call(x):
        nonlocal calls, latest
        calls += 1
        before, latest = latest, x
        return calls, before

    return call


class Counts:
    """Keeps numbers, containers, an array, a tensor, a generator, and what comes later."""

    made = 0

    def __init__(self):
        self.calls, self.by_size = 0, collections.Counter()
        self.latest, self.groups = collections.deque(maxlen=2), collections.defaultdict(list)
        self.sums, self.mean = np.zeros(3), torch.zeros(2)
        self.draws = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0)]
        self.torch_draws = torch.Generator().manual_seed(0)

    def __call__(self, x):
        type(self).made += 1
        self.calls += 1
        self.by_size[len(x)] += 1
        self.latest.append(len(x))
        self.groups[len(x)].append(self.calls)
        self.sums += 1
        self.mean.mul_(0.5).add_(1)
        if not hasattr(self, "first"):
            self.first = {"size": len(x)}
        self.first["again"] = self.calls
        drawn = [self.draws[0].random(), self.draws[1].random(), self.draws[2].rand()]
        drawn.append(float(torch.rand(1, generator=self.torch_draws)))
        kept = (dict(self.by_size), [*self.latest], {k: [*v] for k, v in self.groups.items()})
        return (type(self).made, self.calls, kept, self.sums.tolist(), self.mean.tolist(), drawn)


class Slots:
    __slots__ = ("calls", "later")

    def __init__(self):
        self.calls = 0

    def step(self, x):
        self.calls += 1
        fresh = not hasattr(self, "later")
        self.later = len(x)
        return self.calls, fresh


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: Counts
    names: tuple

    def __call__(self, x):
        return self.inner(x), self.names[0](x)


class Listed(list):
    def clear(self):
        raise AssertionError("of the user's own")


class Mapped(dict):
    __getattr__ = dict.__getitem__


def of_own_containers():
    listed, mapped, latest = Listed(), Mapped(calls=0), collections.UserDict(calls=0)
    listed.calls = 0
    space, numbers, octets = types.SimpleNamespace(calls=0), array.array("d", [0]), bytearray(2)

    def call(x):
        listed.append(len(x))
        listed.calls += 1
        mapped["calls"] += 1
        latest["calls"] += 1
        space.calls += 1
        numbers[0] += 1
        octets[1] += 1
        counts = [listed.calls, mapped.calls, latest["calls"], space.calls]
        return [*listed], counts, numbers[0], octets[1]

    return call


def of_a_teacher():
    """It is averaged without a trace of that in a version, beside a bank of 128 KB."""
    teacher, bank = nn.Linear(4, 4), torch.zeros(256, 128)
    rows = np.zeros((256, 64))

    def call(x):
        for parameter in teacher.parameters():
            parameter.data.mul_(0.5).add_(1)
        bank[0] += 1
        rows[1] += 1
        return float(teacher.weight.detach().sum()), float(bank.sum()), float(rows.sum())

    return call


def of_a_hook():
    model, seen = nn.Linear(1, 1), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))

    def call(x):
        model(torch.zeros(2, 1))
        return [*seen]

    return call


HELD = {
    "a global": lambda: of_a_global,
    "an attribute of a function": lambda: of_an_attribute,
    "a default": lambda: of_a_default,
    "a cell": of_a_cell,
    "an object": Counts,
    "a method": lambda: Slots().step,
    "a frozen dataclass": lambda: Frozen(Counts(), (of_a_cell(),)),
    "a partial": lambda: functools.partial(lambda held, x: held(x), Counts()),
    "a dict of objects": lambda: {"a": [Counts()]}["a"][0],
    "a hook": of_a_hook,
    "containers of one's own": of_own_containers,
    "a teacher": of_a_teacher,
}


@pytest.mark.parametrize("name", HELD)
def test_it_is_put_back_wherever_it_is_kept(name):
    call, x = HELD[name](), "abc"
    call(x)
    state = HeldState(call)
    first = [call(x) for _ in range(3)]
    for _ in range(2):  # it can be restored more than once
        state.restore()
        assert [call(x) for _ in range(3)] == first


def test_what_is_a_librarys_or_another_threads_is_left_alone():
    class Queue:
        def __init__(self):
            self.lock, self.items = threading.Lock(), [1]

    class Optimizer(torch.optim.SGD):
        pass

    optimizer = Optimizer([nn.Parameter(torch.zeros(1))], lr=1.0)
    queue = Queue()
    state = HeldState([queue, optimizer, torch, np.float32])
    queue.items.append(2)
    optimizer.param_groups[0]["lr"] = 2.0
    state.restore()
    assert queue.items == [1, 2]
    assert optimizer.param_groups[0]["lr"] == 2.0


def test_a_dict_that_gives_other_than_it_holds_is_not_filled_from_what_it_gives():
    class Making(collections.OrderedDict):
        def __getitem__(self, key):
            return super().__getitem__(key)()

    makers = Making(a=list)
    state = HeldState(lambda: makers["a"])
    state.restore()
    assert makers["a"] == []


def test_what_was_not_changed_is_not_written():
    numbers = np.array([1.0, np.nan])
    shared = torch.from_numpy(numbers)
    numbers.flags.writeable = False
    state = HeldState([shared])
    version = shared._version
    state.restore()
    assert shared._version == version


def test_weights_that_train_are_put_back_as_long_as_that_costs_little():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(200, 200))
    model.teacher = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    state = HeldState(model, most_bytes=100_000)
    assert not state.moved_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    assert len(state.moved_weights()) == 3  # two of the small layer, and a bias
    state.restore()
    assert [bool((p == 3).all()) for p in model.parameters()] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]


def test_later_looks_keep_of_large_weights_those_that_moved_in_the_first():
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(2, 2))
    first = HeldState(model)
    with torch.no_grad():
        model[0].weight.fill_(3)
    first.restore()
    later = HeldState(model)
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(3)
    later.restore()
    assert [bool((layer.weight == 3).all()) for layer in model] == [False, True, False]


def test_of_large_tensors_so_many_are_kept_as_cost_little():
    banks = [torch.zeros(20_000) for _ in range(3)]
    state = HeldState(banks, most_bytes=2 * 80_000)
    for bank in banks:
        bank.add_(1)
    state.restore()
    assert sorted(float(bank[0]) for bank in banks) == [0, 0, 1]


def test_a_large_container_is_not_copied():
    held = {"words": [str(n) for n in range(200_000)]}
    state = HeldState(held)
    held["words"].append("one more")
    held["more"] = 1
    state.restore()
    assert [*held] == ["words"]
    assert len(held["words"]) == 200_001


class Loss:
    """Weighs by how often it was called, as a warm-up of a loss does."""

    def __init__(self):
        self.calls, self.ema = 0, torch.zeros(())

    def __call__(self, output, target):
        self.calls += 1
        error = (output - target).square().mean()
        self.ema.lerp_(error.detach(), 0.1)
        return error * min(1.0, self.calls / 20) / (1 + self.ema)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.passes = nn.Linear(6, 16), nn.Linear(16, 1), []

    def forward(self, x):
        self.passes.append(len(x))
        return self.b(torch.relu(self.a(x))) * (1 + 0.01 * len(self.passes))


def _plain(x, y, epochs, batch):
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for start in range(0, len(x), batch):
            optimizer.zero_grad()
            loss(model(x[start : start + batch]), y[start : start + batch]).backward()
            optimizer.step()
    return model, loss


def test_exact_training_is_bitwise_with_a_loss_that_counts_its_calls(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    torch.manual_seed(1)
    x, y = torch.randn(128, 6), torch.randn(128, 1)
    wanted, of_plain = _plain(x, y, 3, 16)
    torch.manual_seed(0)
    model, loss = Net(), Loss()
    trainer = Trainer(
        model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        allow="exact",
    )
    trainer.fit(x, y, epochs=3, batch_size=16, shuffle=False)
    assert loss.calls == of_plain.calls == 24
    assert torch.equal(loss.ema, of_plain.ema)
    assert model.passes == wanted.passes
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Cosine(nn.Module):
    """Keeps rows of a weight at length 1, and ids at no more than that, in each forward."""

    def __init__(self, *, by_data):
        super().__init__()
        self.by_data = by_data
        self.embedding = nn.Embedding(50, 6, max_norm=0.5)
        self.head = nn.Linear(6, 3, bias=False)

    def forward(self, ids):
        if self.by_data:
            self.head.weight.data = nn.functional.normalize(self.head.weight.data)
        else:
            with torch.no_grad():
                self.head.weight.div_(self.head.weight.norm(dim=1, keepdim=True)).mul_(0.9)
        return self.head(self.embedding(ids).mean(1))


@pytest.mark.parametrize("by_data", [True, False])
def test_exact_training_is_bitwise_with_weights_that_a_forward_changes(
    tmp_path, monkeypatch, by_data
):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    torch.manual_seed(1)
    batches = [(torch.randint(0, 50, (8, 5)), torch.randint(0, 3, (8,))) for _ in range(60)]
    models = []
    for trains in (False, True):
        torch.manual_seed(0)
        models.append(model := Cosine(by_data=by_data))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if trains:
            how = {"loss": nn.functional.cross_entropy, "optimizer": optimizer, "allow": "exact"}
            Trainer(model, **how).fit(batches, epochs=1, shuffle=False)
            continue
        for ids, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(ids), labels).backward()
            optimizer.step()
    for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(theirs, ours)


def test_a_snapshot_and_a_look_keep_what_compute_holds():
    model, loss = Net(), Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def compute(x):
        return loss(model(x), x[:, :1])

    snapshot = Snapshot(model, optimizer, compute)
    with untouched(model, compute):
        compute(torch.randn(4, 6))
    assert (loss.calls, model.passes) == (0, [])
    compute(torch.randn(4, 6)).backward()
    optimizer.step()
    snapshot.restore()
    assert (loss.calls, model.passes, float(loss.ema)) == (0, [], 0.0)


def test_a_penalty_on_gradients_of_weights_trains_by_a_trainer():
    torch.manual_seed(0)
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(output, target):
        (gradient,) = torch.autograd.grad(output.sum(), model[0].weight, create_graph=True)
        return (output - target).square().mean() + 0.1 * gradient.square().sum()

    trainer = Trainer(model, loss=loss, optimizer="sgd", lr=0.01, say=lambda line: None)
    first, *_, last = trainer.fit(x, y, epochs=5, batch_size=16, verbose=0).epochs
    assert last["loss"] < first["loss"]


class Averaged(nn.Module):
    """Holds a frozen copy of a layer, which forward averages: what it gives cannot be kept."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
        self.teacher = nn.Linear(6, 8).requires_grad_(requires_grad=False)

    def forward(self, x):
        if self.training:
            for own, of_layer in zip(
                self.teacher.parameters(), self.layer.parameters(), strict=True
            ):
                own.data.lerp_(of_layer.data, 0.1)
        return self.head(torch.tanh(self.layer(x)) + self.teacher(x))


def test_a_frozen_teacher_moves_by_steps_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    torch.manual_seed(1)
    x, y = torch.randn(32, 6), torch.randn(32, 1)
    wanted, ours = Averaged(), Averaged()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.05)
    for start in [0, 16] * 3:
        optimizer.zero_grad()
        nn.functional.mse_loss(wanted(x[start : start + 16]), y[start : start + 16]).backward()
        optimizer.step()
    trainer = Trainer(ours, loss="mse", optimizer="sgd", lr=0.05, say=lambda line: None)
    trainer.fit(x, y, epochs=3, batch_size=16, shuffle=False)
    for mine, theirs in zip(ours.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Noisy(torch.utils.data.Dataset):
    """Adds noise of its own generator, and counts what it is asked for."""

    def __init__(self):
        self.x, self.draws, self.asked = torch.ones(12, 6), np.random.default_rng(0), []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        self.asked.append(number)
        return self.x[number] + float(self.draws.normal()), torch.zeros(1)


class Passes(torch.utils.data.IterableDataset):
    """Its samples depend on how often it was read."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield from ((torch.full((6,), float(self.passes + i)), torch.zeros(1)) for i in range(12))


@pytest.mark.parametrize("kind", [Noisy, Passes])
@pytest.mark.parametrize("is_loader", [True, False], ids=["a loader", "a dataset"])
def test_a_dataset_is_read_from_where_it_was(kind, is_loader):
    dataset, wanted = kind(), kind()
    seen = []

    def loss(output, target):
        seen.append(float(output.detach().sum()))
        return (output - target).square().mean()

    def batches(of):
        return torch.utils.data.DataLoader(of, batch_size=4)

    given = {"x": batches(dataset)} if is_loader else {"x": dataset, "batch_size": 4}
    trainer = Trainer(nn.Linear(6, 1), loss=loss, optimizer="sgd", lr=0.0, say=lambda line: None)
    trainer.fit(**given, epochs=2, shuffle=False, verbose=0)
    model = trainer.model
    expected = [float(model(x).detach().sum()) for _ in range(2) for x, _ in batches(wanted)]
    assert seen == pytest.approx(expected)


def test_tensors_without_values_or_comparison_are_no_hindrance():
    held = {
        "meta": torch.zeros(3, device="meta"),
        "bits": torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
        "float8": torch.zeros(4).to(torch.float8_e4m3fn),
        "nan": torch.full((2,), torch.nan),
    }
    state = HeldState(held)
    held["meta"] = None
    state.restore()
    assert held["meta"].is_meta


def test_a_file_that_an_array_maps_is_not_written_to(tmp_path):
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(4,))
    state = HeldState({"rows": mapped})
    mapped[0] = 1.0
    state.restore()
    assert mapped[0] == 1.0
