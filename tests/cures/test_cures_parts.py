"""What cures are made of: which fields they take, numbers for later, packed samples."""

import json
import math
import pickle
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import distributed
from torch.utils.hooks import RemovableHandle

from flatout.cures import record
from flatout.cures.cache import Cached
from flatout.cures.ddp import _all_reduce
from flatout.cures.install import CURES, in_words, wanted
from flatout.cures.later import DeferredNumber
from flatout.cures.sample_store import Store, form_of
from flatout.cures.self_test import check
from flatout.data.digests.reach import Attributes
from flatout.errors import FlatoutError
from flatout.recipe import FIELDS, PLAIN, Choice, Parity, Recipe


def test_fields_that_are_open_or_as_in_plain_torch_ask_for_nothing():
    recipe = Recipe(
        compute={"precision": "bf16", "memory_format": "auto", "compile": "off"},
        input={"workers": 2, "pin_memory": "off"},
        script={"log_every": 10, "garbage": "as_written"},
        save={"keep_last": 7},
    )
    asked = wanted(recipe)
    assert asked == {"compute.precision": "bf16", "input.workers": 2, "script.log_every": 10}
    assert in_words(asked) == ["bf16", "workers=2", "log_every=10"]
    assert wanted(Recipe()) == {}


def test_fp32_and_no_workers_are_asked_for_by_name_but_not_by_a_resolved_recipe():
    named = Recipe(compute={"precision": "fp32"}, input={"workers": 0})
    assert wanted(named) == {"compute.precision": "fp32", "input.workers": 0}
    values = {**PLAIN, "process.threads": 1}
    values["script.cache"] = "memory"
    choices = {
        field: Choice(value=values[field], reason="measured", parity=Parity.EXACT)
        for field in FIELDS
    }
    resolved = Recipe().resolve(choices, {})
    assert "compute.precision" not in wanted(resolved.request())
    assert wanted(resolved.request())["script.cache"] == "memory"
    assert wanted(resolved.for_other_machine()) == {"script.cache": "memory"}


def test_each_cure_is_found_by_its_name():
    assert set(CURES) <= set(FIELDS)
    for field, cure in CURES.items():
        assert callable(cure.load()), field
    around = sorted((cure.around, field) for field, cure in CURES.items() if cure.around)
    assert [field for _, field in around] == [
        "script.features",
        "compute.rewrites",
        "compute.compile",
        "compute.memory_format",
        "compute.precision",
        "script.evaluation",
    ]


def test_hooks_leave_the_step_of_a_model_as_it_is():
    before = vars(torch.nn.Module)["__call__"], torch.optim.Optimizer.add_param_group
    states = torch.get_rng_state(), torch.get_num_threads()
    record.begin({})
    check(torch)
    assert before == (vars(torch.nn.Module)["__call__"], torch.optim.Optimizer.add_param_group)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == torch.get_num_threads()


def test_hooks_that_are_not_called_are_noticed(monkeypatch):
    record.begin({})
    hooks = OrderedDict()

    def register(hook):
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    with monkeypatch.context() as patch:
        optimizers = sys.modules["torch.optim.optimizer"]
        patch.setattr(optimizers, "register_optimizer_step_post_hook", register)
        with pytest.raises(FlatoutError, match="one optimizer step was counted as 0 steps"):
            check(torch)
    check(torch)
    assert not hooks


class Fetched:
    """A number that arrives when it is told to."""

    def __init__(self, value):
        self.value = value
        self.is_here = False
        self.waits = 0

    def later(self):
        return DeferredNumber(self.fetch, lambda: self.is_here, type(self.value))

    def fetch(self):
        self.waits += not self.is_here
        self.is_here = True
        return self.value


def test_sums_of_numbers_on_their_way_do_not_wait():
    numbers = [Fetched(0.1 * i) for i in range(1, 6)]
    total = 0.0
    for number in numbers:
        total += number.later() * 2 / 3 - 1
    assert sum(number.waits for number in numbers) == 0
    assert isinstance(total, float)
    expected = 0.0
    for number in numbers:
        expected += number.value * 2 / 3 - 1
    assert float(total) == expected
    assert [number.waits for number in numbers] == [1] * 5


def test_a_sum_of_very_many_is_fetched_on_the_way():
    numbers = [Fetched(float(i)) for i in range(3000)]
    total = 0
    for number in numbers:
        total = total + number.later()
    assert float(total) == sum(range(3000))


def test_a_number_for_later_is_used_as_the_number_that_it_is():
    x = 2.5
    assert f"{Fetched(x).later():.2f} {Fetched(x).later()}" == "2.50 2.5"
    assert "%.1f" % Fetched(x).later() == "2.5"  # noqa: UP031 (scripts do so)
    assert Fetched(x).later() > 2
    assert Fetched(x).later() == x
    assert 3 > Fetched(x).later()  # noqa: SIM300
    assert math.sqrt(Fetched(x).later()) == math.sqrt(x)
    assert round(Fetched(x).later(), 0) == 2.0
    assert abs(-Fetched(x).later()) == x
    assert 2 ** Fetched(x).later() == 2**x
    assert np.mean([Fetched(x).later(), Fetched(0.5).later()]) == 1.5
    assert list(range(5))[Fetched(2).later()] == 2
    assert pickle.loads(pickle.dumps(Fetched(x).later())) == x
    assert type(pickle.loads(pickle.dumps(Fetched(x).later()))) is float
    assert torch.equal(torch.ones(2) + Fetched(x).later(), torch.full((2,), 3.5))
    assert Fetched(x).later().is_integer() is False
    with pytest.raises(ZeroDivisionError):
        1 / Fetched(0.0).later()
    with pytest.raises(ZeroDivisionError):
        Fetched(1.0).later() / 0
    assert json.dumps(x) == repr(Fetched(x).later())


SAMPLES = {
    "image and label": lambda i: (torch.full((3, 4, 5), i + 0.5), i % 3),
    "in another order": lambda i: (torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1) + i,),
    "half": lambda i: torch.full((7,), i, dtype=torch.bfloat16),
    "dict": lambda i: {"x": np.full((3, 2), i, order="F"), "y": np.int16(i), "z": [i / 3, True]},
    "nothing": lambda i: (torch.zeros(0, 4), None, i, np.zeros((2, 0), np.float32)),
    "None alone": lambda i: [None],
    "one channel": lambda i: torch.arange(6).reshape(2, 3, 1).permute(2, 0, 1) + i,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_comes_back_as_it_was(name):
    make = SAMPLES[name]
    store = Store(form_of(make(0)), 10)
    for i in range(12):
        store.keep(i, make(i))
    assert store.has([*range(12), -1]) == [True] * 10 + [False] * 3
    for i in range(10):
        assert same(store.get([i]), [make(i)])
        assert store.get([i])[0] is not store.get([i])[0]
    assert same(store.get([7, 2, 7]), [make(7), make(2), make(7)])


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.strides == b.strides and np.array_equal(a, b)
    if isinstance(a, (tuple, list)):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def test_what_is_of_another_form_is_not_kept():
    store = Store(form_of((torch.zeros(3), 1)), 10)
    other = [
        (torch.zeros(4), 1),
        (torch.zeros(3).double(), 1),
        (torch.zeros(3), 1.0),
        torch.zeros(3),
    ]
    for i, sample in enumerate(other):
        store.keep(i, sample)
        assert store.has([i]) == [False]
    for sample in ("text", (torch.zeros(3), "text"), torch.zeros(3, requires_grad=True), 2**70):
        assert form_of(sample) is None


def test_a_store_that_was_sent_to_a_process_is_the_same_memory():
    store = Store(form_of(torch.zeros(3)), 4)
    sent = pickle.loads(pickle.dumps(store))
    sent.keep(2, torch.ones(3))
    assert store.has([1, 2]) == [False, True]
    assert torch.equal(store.get([2])[0], torch.ones(3))


class Held:
    def __init__(self):
        self.number, self.table, self.inner = 1, torch.zeros(3), [{"a": 1}]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda held: setattr(held, "number", 2), "Held.number"),
        (lambda held: held.table.add_(1), "Held.table"),
        (lambda held: held.inner[0].update(b=2), "Held.inner[0]"),
        (lambda held: setattr(held, "more", None), "Held.more"),
        (lambda held: setattr(held, "number", 1), ""),
    ],
)
def test_changes_of_an_object_are_seen(change, name):
    held = Held()
    before = Attributes(held)
    assert before.changed(held) == ""
    change(held)
    assert before.changed(held).startswith(name)
    assert bool(before.changed(held)) == bool(name)


@pytest.mark.gpu
def test_numbers_of_a_gpu_are_those_of_the_moment_they_were_asked_for():
    from flatout.cures.host_syncs import _later

    item = torch.Tensor.item
    tensor = torch.zeros((), device="cuda")
    found = []
    for _ in range(200):
        tensor += 1
        found.append(_later(torch, tensor, item))
    assert [float(number) for number in found] == [float(i) for i in range(1, 201)]


class Rows:
    """A dataset that makes many samples at once, and counts them."""

    def __init__(self):
        self.made = 0

    def __len__(self):
        return 6

    def __getitem__(self, i):
        self.made += 1
        return torch.full((2,), float(i))

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_a_dataset_that_makes_samples_together_makes_those_that_are_not_there():
    rows = Rows()
    cached = Cached(rows, Store(form_of(rows[0]), 4))
    rows.made = 0
    for _ in range(2):
        found = cached.__getitems__([1, np.int64(2), 5, 1])
        assert [float(sample[0]) for sample in found] == [1, 2, 5, 1]
    # Row 1 stands twice in the first batch, and row 5 has no place.
    assert rows.made == 4 + 1
    assert float(cached[np.int64(2)][0]) == 2
    assert (len(cached), cached.made, rows.made) == (6, 5, 5)
    cached.made = 0
    assert rows.made == 0


def test_gloo_holds_nothing_any_more_that_was_added_up():
    # It would be the last to let go of it, while Python ends: the rank would end with SIGABRT.
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for _ in range(1000):
            tensor = torch.ones(8)
            holders = sys.getrefcount(tensor), tensor._use_count()
            _all_reduce(distributed, tensor, distributed.ReduceOp.SUM, None)
            assert (sys.getrefcount(tensor), tensor._use_count()) == holders
    finally:
        distributed.destroy_process_group()
