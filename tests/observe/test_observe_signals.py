"""What single signals are taken from: batches, generators, lines, numbers, modules, graphs."""

import random
import runpy
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from flatout.models.rewrites import find_pairs
from flatout.observe.generators import Draws, drawn_alike, generators_of
from flatout.observe.graphs import line_that_fills, nodes_of
from flatout.observe.inside import Inside, frozen_parts
from flatout.observe.line_clock import LineClock
from flatout.observe.metrics import MetricHooks
from flatout.observe.model_facts import describe, not_finite
from flatout.observe.models import SeenModel
from flatout.observe.numbers import Numbers, flushes_subnormals, subnormal_share
from flatout.observe.observation import Model, Optimizer
from flatout.observe.optimizers import SeenOptimizer
from flatout.observe.padding import Padding
from flatout.observe.watch import Watch


def sequences(lengths, width, *, left=False):
    rows = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in zip(rows, lengths, strict=True):
        place = slice(width - length, None) if left else slice(length)
        row[place] = torch.arange(1, length + 1)
    return rows


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_what_fills_the_rows(left):
    padding = Padding()
    padding.look(sequences([10, 40, 30, 40], 40, left=left))
    assert padding.share == 1 - 120 / 160
    padding.look(sequences([8, 16], 16, left=left))
    assert padding.share == 1 - 144 / 192
    assert padding.lengths == {16, 40}


def test_frames_are_padded_where_all_their_numbers_are_zero():
    frames = torch.ones(2, 20, 3)
    frames[0, 5:] = 0
    frames[1, 3, 0] = 0
    padding = Padding()
    padding.look(frames)
    assert padding.share == 15 / 40


def test_frames_are_padded_likewise_where_convolutions_take_their_channels_first():
    frames = torch.ones(2, 3, 20)
    frames[0, :, 5:] = 0
    padding = Padding()
    padding.look(frames)
    assert (padding.share, padding.lengths) == (15 / 40, {20})
    padding.look(torch.ones(2, 9, 16))  # whose channels are no places
    assert (padding.share, padding.lengths) == (15 / 72, {16, 20})


def test_a_frozen_batch_norm_that_follows_the_average_of_another_one_is_no_mistake():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.requires_grad_(False)
    seen = SeenModel(model)
    assert seen.frozen_norms(model) == ["1", "2"]
    with torch.no_grad():
        model[1].weight.lerp_(torch.zeros(4), 0.01)
    assert seen.frozen_norms(model) == ["2"]
    alone = nn.BatchNorm1d(4).requires_grad_(False)
    assert SeenModel(alone).frozen_norms(alone) == [""]
    assert SeenModel(alone.eval()).frozen_norms(alone) == []


def test_what_means_something_is_no_padding():
    padding = Padding()
    counts = torch.zeros(4, 50, dtype=torch.long)
    counts[torch.arange(4), torch.tensor([3, 20, 30, 49])] = 1  # words of a bag
    padding.look(counts)
    padding.look(torch.ones(4, 16, dtype=torch.long))  # a column
    assert padding.share == 0.0


def test_pictures_and_flags_are_no_sequences():
    padding = Padding()
    for batch in (torch.zeros(2, 3, 9, 9), torch.zeros(2, 9), torch.zeros(2, 9).bool()):
        padding.look(batch)
    assert padding.share is None


class Noisy:
    """A dataset that draws; where from is said by `draw`."""

    def __init__(self, draw):
        self.rng = np.random.default_rng(0)
        self.inner = types.SimpleNamespace(dice=[random.Random(1)], seeded=random.Random(2))
        self.draw = draw

    def __getitem__(self, i):
        return self.draw(self, i)


def worker(draw, first):
    """The states of a worker that makes two batches of four samples."""
    dataset = Noisy(draw)
    draws = Draws(dataset)
    for batch in range(2):
        for i in range(first + 4 * batch, first + 4 * batch + 4):
            dataset[i]
        draws.look()
    draws.look()
    assert len(draws.states) == 3
    return draws.states


def test_generators_of_a_dataset_are_found_by_name():
    found = dict(generators_of(Noisy(lambda self, i: SHARED.random())))
    assert set(found) == {
        "dataset.rng",
        "dataset.inner.dice[0]",
        "dataset.inner.seeded",
        "dataset.draw.SHARED",
    }


SHARED = random.Random(7)


def test_copied_generators_draw_alike():
    states = [worker(lambda self, i: self.rng.normal(), first) for first in (0, 100)]
    name, alike = drawn_alike(states)
    assert name == "dataset.rng"
    assert alike[0] == alike[1]


class Augmenting(Noisy):
    def __getitem__(self, i):
        return self.augment(i)

    def augment(self, i):
        return SHARED.random()


def test_a_generator_of_a_module_is_found_in_the_methods_that_draw_from_it():
    assert "dataset.augment.SHARED" in dict(generators_of(Augmenting(None)))


def test_generators_that_are_seeded_for_each_sample_do_not():
    states = [worker(lambda self, i: self.inner.seeded.seed(i), first) for first in (0, 100)]
    name, alike = drawn_alike(states)
    assert name == "dataset.inner.seeded"
    assert alike[0] != alike[1]


def test_equal_generators_that_are_never_drawn_from_are_no_matter():
    assert drawn_alike([worker(lambda self, i: i, 0)] * 2) == ("", [])


def test_looking_at_generators_draws_nothing():
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    Draws(Noisy(lambda self, i: i)).look()
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tobytes() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_lines_are_timed_with_what_they_call():
    code = (
        "def parse(n):\n    total = 0\n    for i in range(n):\n        total += sum(range(9999))\n"
    )
    names: dict = {}
    exec(compile(code + "    return total\n", "/of/a/user.py", "exec"), names)
    outer, clock = sys.gettrace(), LineClock()
    sys.settrace(None)
    try:
        clock.start()
        names["parse"](100)
        clock.stop()
    finally:
        sys.settrace(outer)
    assert set(clock.ns) == {("/of/a/user.py", line) for line in (1, 2, 3, 4, 5)}
    assert clock.ns.most_common(1)[0][0] == ("/of/a/user.py", 4)
    assert sum(clock.ns.values()) <= clock.whole_ns


MODULE = """
import sys

losses = []
for step in range(3):
    losses.append(step)
frame = sys._getframe()
"""


def test_the_line_of_a_module_that_fills_a_list_is_found(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MODULE)
    site = line_that_fills(runpy.run_path(str(script))["frame"], "losses")
    assert (site.file, site.line) == (str(script), 6)


class Dropping(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.1, self.training)


def test_layers_that_drop_within_are_known():
    layers = [
        nn.GRU(4, 4, num_layers=2, dropout=0.2),
        nn.GRU(4, 4, num_layers=2),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.MultiheadAttention(4, 2),
        Dropping(),
        nn.Linear(4, 4),
    ]
    facts = Model("Net")
    describe(nn.ModuleList(layers), facts, whole=False)
    found = {name: count for name, count in facts.layers.items() if "Dropout" in name}
    assert found == {f"Dropout in {kind}": 1 for kind in ("GRU", "MultiheadAttention", "Dropping")}


def test_numbers_that_are_none():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    assert not_finite(model) == []
    model[1].running_var[0] = torch.nan
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    assert not_finite(model) == ["0.weight", "1.running_var"]


def test_numbers_that_are_too_small():
    model = nn.Linear(32, 32)
    assert subnormal_share(model.parameters()) == 0.0
    with torch.no_grad():
        model.weight[:8] = 1e-40
    assert subnormal_share(model.parameters()) == 0.25
    assert not flushes_subnormals(torch)
    torch.set_flush_denormal(True)
    try:
        assert flushes_subnormals(torch)
        assert subnormal_share(model.parameters()) == 0.25
    finally:
        torch.set_flush_denormal(False)


def test_moments_of_weights_that_are_no_longer_trained_become_too_small():
    model = nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    facts, watch = Optimizer("Adam"), Watch()
    watch.optimizers.append(SeenOptimizer(optimizer, facts))
    numbers = Numbers(torch, watch)
    for step in range(1, 1101):
        used = model(torch.ones(4, 32))[:, : 16 if step > 5 else 32]
        optimizer.zero_grad()
        used.mean().backward()
        optimizer.step()
        if step == 500:
            numbers.look()
            assert facts.subnormal_share == 0.0
    numbers.look()
    assert facts.subnormal_share == 0.5
    assert subnormal_share(model.parameters()) == 0.0


class Finder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 4, 3), nn.MaxPool2d(2)
        self.act = nn.ReLU()

    def forward(self, x):
        x = self.conv(x)
        return self.pool(self.act(x))


def test_pairs_that_could_change_places_have_names_and_lines():
    (pair,) = find_pairs(nn.Sequential(Finder(), nn.Flatten()))
    assert (pair.activation, pair.pooling) == ("0.act", "0.pool")
    assert pair.file == __file__
    first = Finder.forward.__code__.co_firstlineno
    assert pair.line == first + 2
    (pair,) = find_pairs(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.MaxPool2d(2)))
    assert (pair.activation, pair.pooling, pair.file) == ("1", "2", "")


def test_frozen_parts_are_the_outermost_that_do_nothing_else():
    body, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(body, norm, head).requires_grad_(False)
    head.requires_grad_(True)
    assert list(frozen_parts(model)) == [body]
    norm.eval()
    assert list(frozen_parts(model)) == [body, norm]


def test_the_time_of_frozen_parts_and_autocast_within(monkeypatch):
    # As in a process that has compiled nothing, whatever other tests did.
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    body = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).requires_grad_(False)
    model = nn.Sequential(body, nn.Linear(64, 2))
    done = []  # each layer takes 1 ns
    monkeypatch.setattr("flatout.observe.inside.perf_counter_ns", lambda: len(done))
    handles = [
        layer.register_forward_hook(lambda *_: done.append(1)) for layer in (*body, model[1])
    ]
    plain = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(plain)
    watch = Watch()
    Inside(torch, watch)
    seen = SeenModel(model)
    seen.is_stepped = True
    watch.models.append(seen)
    for step in range(1, 9):
        model(torch.ones(8, 64))
        watch.lanes.steps = step
        watch.attend()
    assert seen.facts.autocast == "bfloat16"
    assert seen.facts.frozen_share == 0.75
    for handle in handles:
        handle.remove()
    assert not model._forward_hooks
    assert not body._forward_pre_hooks


@pytest.mark.parametrize("how", ["frozen", "no_grad", "dropout", "moves", "seldom"])
def test_a_backbone_that_steps_call_by_itself_is_timed(monkeypatch, how):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    backbone = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5) if how == "dropout" else nn.ReLU())
    backbone.requires_grad_(how == "no_grad")
    now = [0]  # ns; each layer takes 1e6
    monkeypatch.setattr("flatout.observe.inside.perf_counter_ns", lambda: now[0])
    for layer in backbone:
        layer.register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 10**6))
    watch, seen = Watch(), SeenModel(backbone)
    Inside(torch, watch)
    watch.models.append(seen)
    for step in range(1, 9):
        if how != "seldom" or step == 5:
            with torch.set_grad_enabled(how != "no_grad"):
                backbone(torch.ones(4, 8))
        if how == "moves":
            with torch.no_grad():
                backbone[0].weight.mul_(0.9)
        watch.lanes.steps = step
        watch.attend()
    assert seen.alone_ms == (2.0 if how in ("frozen", "no_grad") else None)
    assert not backbone._forward_hooks


def test_graphs_are_counted_by_their_nodes():
    weight = torch.ones(3, requires_grad=True)
    losses = [(weight * step).sum() for step in range(5)]
    # A sum and a product each, and the weight's own.
    assert nodes_of(losses) == 11
    assert nodes_of([sum(losses)]) == 16


def loop(log):
    for _ in range(3):
        record(log)


def record(log):
    log()


def test_what_is_told_in_a_function_is_told_by_the_loop():
    watch = Watch()
    watch.calls.loops.add(loop.__code__)
    loop(lambda: watch.calls.note("log", 5, depth=1))
    loop(lambda: watch.calls.note("item", 5, depth=1))
    log, item = sorted(watch.calls.all(), key=lambda call: call.kind, reverse=True)
    assert (log.count, log.site.line) == (3, loop.__code__.co_firstlineno + 2)
    assert item.site.line > log.site.line


def test_the_time_of_the_set_up_is_that_of_no_step():
    # The first optimizer of a process imports much of torch.
    watch = Watch()
    watch.calls.note("optimizer", 2 * 10**9, depth=1)
    watch.calls.note("log", 5, depth=1)
    watch.calls.forget()
    (made,) = watch.calls.all()
    assert (made.kind, made.count, made.steps, made.seconds) == ("optimizer", 1, 1, 0.0)


def test_metrics_are_timed_once_though_they_call_one_another():
    owner = types.ModuleType("metrics")
    owner.__all__ = ["f1_score", "make_scorer"]
    owner.make_scorer = lambda: None
    exec("def f1_score(inner=None):\n    return inner() if inner else 1.0", vars(owner))
    watch, plain = Watch(), owner.make_scorer
    MetricHooks(watch)._hook_sklearn(owner)
    assert owner.f1_score(owner.f1_score) == 1.0
    (metric,) = watch.calls.all()
    assert (metric.kind, metric.count, metric.detail) == ("metric", 1, {"name": "f1_score"})
    assert owner.make_scorer is plain
