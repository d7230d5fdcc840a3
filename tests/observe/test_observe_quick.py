"""Hooks in C: what they see is what the hooks in Python see, in whose places they stand."""

import gc
import linecache
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.kernels import Clock, Loaded
from flatout.observe import quick as quick_hooks
from flatout.observe.backward import watch_backward
from flatout.observe.lanes import BACKWARD, EVALUATION, FORWARD, HOST, INPUT, OPTIMIZER
from flatout.observe.loaders import watch_loaders
from flatout.observe.models import Models
from flatout.observe.optimizers import StepFinder
from flatout.observe.quick import AFTER_STEPS, Quick
from flatout.observe.watch import Watch
from flatout.observe.within_loader import watch_fetch


class Job:
    """A job whose calls go through hooks that no other job has."""

    def __init__(self):
        self.watch = Watch()
        self.autograd = SimpleNamespace(backward=self._backward)
        self.hooks = {}
        self.failing = False
        seam = SimpleNamespace(
            autograd=self.autograd,
            compiler=torch.compiler,
            is_grad_enabled=torch.is_grad_enabled,
        )
        optimizer_module = SimpleNamespace(
            register_optimizer_step_pre_hook=self._register,
            register_optimizer_step_post_hook=self._register,
        )
        self.steps = StepFinder(self.watch)
        watch_backward(seam, self.watch, self.steps)
        self.steps.hook_into(torch, optimizer_module)

        class Inner(nn.Linear):
            pass

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Inner(2, 2)
                self.calls = []

            def forward(self, x, *, scale=1):
                self.calls.append((x.shape, scale))
                return self.inner(x) * scale

        models = Models(torch, self.watch)
        models.watch_class(Outer)
        models.watch_class(Inner)
        self._watch_loaders()
        self.models = [Outer(), Outer(), Inner(2, 2)]
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in self.models[:2]]

    def _watch_loaders(self):
        class Iterator:
            def __init__(self, loader):
                self.numbers = iter(loader.batch_sampler)

            def _next_index(self):
                return next(self.numbers)

            def __next__(self):
                return [torch.tensor(self._next_index())]

        class Loader(DataLoader):
            def __iter__(self):
                return Iterator(self)

        module = SimpleNamespace(DataLoader=Loader, _BaseDataLoaderIter=Iterator)
        watch_loaders(module, self.watch, looks_within=False)
        rows = TensorDataset(torch.arange(40))
        self.loaders = [Loader(rows, batch_size=4), Loader(rows, batch_size=8)]
        self.iterators = [None, None]
        self.given = []

    def next(self, which):
        if self.iterators[which] is None:
            self.iterators[which] = iter(self.loaders[which])
        try:
            self.given.append(next(self.iterators[which])[0].tolist())
        except StopIteration:
            self.iterators[which] = None

    def _register(self, hook):
        handle = SimpleNamespace(id=len(self.hooks), hooks_dict_ref=lambda: self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def _backward(self, *args, **kwargs):
        if self.failing:
            raise ValueError("no gradient")

    def call(self, which, mode):
        model = self.models[which]
        model.train(mode not in ("eval", "held_out"))
        with torch.no_grad() if mode in ("no_grad", "held_out") else nullcontext():
            model(torch.ones(1, 2), **({"scale": 2} if which < 2 else {}))

    def backward(self, keeps, failing):
        self.failing = failing
        more = {"retain_graph": True} if keeps == "by name" else {"inputs": None}
        args = (None, None, True) if keeps == "by place" else (None,)
        try:
            self.autograd.backward(*args, **more)
        except ValueError:
            assert failing

    def step(self, which, wraps):
        for _ in range(1 + wraps):
            self.hooks[0](self.optimizers[which], (), {})
        for _ in range(1 + wraps):
            self.hooks[1](self.optimizers[which], (), {})

    def batch(self, loader):
        if self.watch.lanes.begin_batch():
            self.watch.lanes.loader = loader
            self.watch.lanes.take()

    def state(self):
        """All that does not depend on how long anything has taken."""
        lanes = self.watch.lanes
        return (
            (lanes.steps, lanes.backwards, lanes.current, lanes.is_inside, lanes.is_open),
            (lanes.is_counted, lanes.is_trained_on, lanes.seen_backwards, lanes.before is None),
            len(lanes.evaluations),
            getattr(lanes.loader, "in_training", None),
            [(m.calls, m.due, len(m.shapes), m.ref() is not None) for m in self.watch.models],
            [(dict(o.backwards), o.ends_round) for o in self.watch.optimizers],
            [(lane > 0, lane < 0) for lane in lanes.spent],
            [(m._evaluated, m._trained, set(m._evaluated_in), m.opened) for m in self.watch.models],
            [m.calls for m in self.models[:2]],
            self.watch.calls.noted,
            [(x.batches, len(x.waits), x.in_training) for x in self.watch.loaders],
            [(x.facts.epochs, list(x.facts.hashes or [])) for x in self.watch.loaders],
            list(self.given),
        )


MODES = ("train", "train", "eval", "no_grad", "held_out")
EVENTS = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 2), st.sampled_from(MODES)),
    st.tuples(st.just("backward"), st.sampled_from(["", "", "by name", "by place"]), st.booleans()),
    st.tuples(st.just("step"), st.integers(0, 1), st.booleans()),
    st.tuples(st.just("batch"), st.integers(0, 1)),
    st.tuples(st.just("next"), st.integers(0, 1)),
    st.tuples(st.just("a step")),
    st.tuples(st.just("a step")),
    st.tuples(st.just("renew")),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(EVENTS, max_size=40))
@example([("renew",), ("call", 0, "no_grad"), ("call", 0, "train")])
@example([("call", 0, "held_out")] * 12 + [("call", 0, "train"), ("call", 0, "held_out")])
@example([("call", 0, "no_grad")] * 12 + [("a step",), *[("call", 0, "no_grad")] * 3, ("batch", 0)])
@example([("call", 1, "held_out"), ("a step",)] * 12 + [("call", 1, "held_out"), ("next", 0)] * 2)
@example([("next", 0), ("a step",), *[("next", 1)] * 7, ("call", 0, "eval")] * 6)
@example([("call", 1, "held_out")] * 12 + [("call", 0, "held_out"), ("call", 1, "no_grad")])
@example([("call", 0, "no_grad"), ("call", 1, "no_grad"), ("a step",)] * 30)
@example([("call", 0, "no_grad"), ("a step",)] * 20 + [("call", 0, "held_out"), ("a step",)] * 4)
@example([("call", 0, "no_grad"), ("a step",)] * 20 + [("call", 0, "no_grad"), ("next", 0)] * 3)
def test_they_see_what_the_hooks_in_python_see(events):
    said = []
    for is_quick in (False, True):
        job, seen = Job(), []
        if not is_quick:
            job.watch.quick.end()
        loaders = [SimpleNamespace(in_training=False), SimpleNamespace(in_training=False)]
        for name, *given_ in [("a step",)] * 6 + events:
            if name == "a step":
                job.call(0, "train")
                job.backward("", False)
                job.step(0, False)
            elif name == "batch":
                job.batch(loaders[given_[0]])
            elif name == "renew":
                job.watch.renew()
            else:
                getattr(job, name)(*given_)
            seen.append(job.state())
        is_later = job.watch.lanes.steps >= job.watch.began + AFTER_STEPS
        if is_quick and ("renew",) not in events and is_later:
            assert job.watch.quick.is_on
        said.append(seen)
    assert said[0] == said[1]


def _quick_job():
    job = Job()
    for _ in range(6):
        job.call(0, "train")
        job.backward("", False)
        job.step(0, False)
    job.watch.models[0].due = 1000
    assert job.watch.quick.is_on
    return job


def test_python_is_asked_about_nothing_that_is_as_before():
    job = _quick_job()
    quick = job.watch.quick
    before = quick.backwards, quick.calls, quick.steps
    for _ in range(10):
        job.call(0, "train")
        job.backward("", False)
        job.step(0, False)
    after = quick.backwards, quick.calls, quick.steps
    assert [b - a for a, b in zip(before, after, strict=True)] == [10, 10, 10]
    assert job.watch.optimizers[0].backwards == {1: 16}
    assert job.watch.models[0].calls == 16


def test_what_acts_before_it_is_trained_is_a_part_of_the_step():
    job = _quick_job()
    lanes, quick = job.watch.lanes, job.watch.quick
    for number in range(40):
        before = lanes.spent, quick.calls
        job.call(0, "no_grad")  # the agent acts
        acted = lanes.current
        job.call(1, "no_grad")  # its target network
        job.call(0, "train")
        job.backward("", False)
        job.step(0, False)
        if number >= 30:
            assert acted == HOST  # what follows is the environment
            assert lanes.spent[EVALUATION] == before[0][EVALUATION]
            assert quick.calls == before[1] + 3
    assert lanes.spent[EVALUATION] > 0  # of the first ones it is not known yet
    assert not any(model.is_evaluated(lanes.steps) for model in job.watch.models)


@pytest.mark.parametrize("keeps", ["by name", "by place"])
def test_python_is_asked_which_line_keeps_its_graphs_but_not_for_ever(keeps):
    job = _quick_job()
    for number in range(100):
        if number == 60:  # as where a hook comes upon those that stand there
            job.watch.quick.rest()
            job.watch.quick.begin()
        job.call(0, "train")
        job.backward(keeps, False)
        job.step(0, False)
    (noted,) = job.watch.calls.all()
    assert noted.detail == {"retain_graph": True}
    assert (noted.count, job.watch.quick.backwards) == (40, 62)  # two were seen before
    assert job.watch.optimizers[0].backwards == {1: 106}


def test_python_is_asked_about_few_of_a_loaders_batches():
    job = _quick_job()
    for _ in range(150):
        job.next(0)
        job.call(0, "train")
        job.backward("", False)
        job.step(0, False)
    (seen,) = job.watch.loaders
    assert seen.batches == len(job.given) == 137  # fourteen times none was left
    # The first of each epoch, and one in sixteen.
    assert job.watch.quick.batches == 137 - 14 - 8
    assert len(seen.waits) == 137 - 14
    assert seen.in_training


def test_python_is_not_asked_how_batches_are_made_once_that_is_known():
    watch, asked = Watch(), []

    class Fetcher:
        def fetch(self, index):
            return index

    other = type("Other", (Fetcher,), {})
    module = SimpleNamespace(_MapDatasetFetcher=Fetcher, _IterableDatasetFetcher=other)
    watch.quick.hooks += watch_fetch(module, asked.append, watch.quick.fetch)
    watch.quick.begin()
    loader = watch.lanes.loader = Loaded()
    loader.wants_within = True
    assert Fetcher().fetch(3) == 3
    assert len(asked) == 1
    loader.wants_within = False
    assert Fetcher().fetch(4) == 4
    assert (len(asked), watch.quick.fetches) == (1, 1)


def test_python_is_not_asked_in_an_evaluation_that_goes_on():
    job = _quick_job()
    for _ in range(12):
        job.call(0, "held_out")
    before = job.watch.quick.calls
    for _ in range(10):
        job.call(0, "held_out")
    assert job.watch.quick.calls == before + 10
    job.call(0, "no_grad")  # in another mode
    job.call(0, "train")
    assert job.watch.quick.calls == before + 10
    assert job.watch.models[0].calls == 30


def test_python_is_not_asked_about_a_model_that_each_step_calls_without_gradients():
    job = _quick_job()

    def step():
        job.call(1, "held_out")
        job.call(0, "train")
        job.backward("", False)
        job.step(0, False)

    for _ in range(12):
        step()
    before = job.watch.quick.calls, job.watch.quick.steps
    for _ in range(10):
        step()
    assert (job.watch.quick.calls, job.watch.quick.steps) == (before[0] + 20, before[1] + 10)
    assert not job.watch.lanes.evaluations
    # From another line it may be evaluated, which is known once a batch is asked for.
    job.models[1].eval()
    with torch.no_grad():
        job.models[1](torch.ones(1, 2))
    assert job.watch.quick.calls == before[0] + 20
    job.next(0)
    teacher = next(one for one in job.watch.models if one.ref() is job.models[1])
    assert "job.models[1](torch" in linecache.getline(__file__, teacher.evaluated_at.line)


def test_a_line_that_was_a_part_of_each_step_may_evaluate():
    job = _quick_job()
    for _ in range(12):
        job.call(1, "held_out")
        job.call(0, "train")
        job.backward("", False)
        job.step(0, False)
    before = job.watch.quick.calls
    job.call(1, "held_out")
    assert job.watch.quick.calls == before + 1
    job.next(0)
    teacher = next(one for one in job.watch.models if one.ref() is job.models[1])
    assert teacher.evaluated_at == teacher._trained[False, False]
    job.call(1, "held_out")
    assert job.watch.quick.calls == before + 1  # Python is asked again


def test_lanes_are_told_apart():
    job = _quick_job()
    lanes, seen = job.watch.lanes, []
    original = job.models[0].forward
    job.models[0].forward = lambda x, **more: (seen.append(lanes.current), original(x, **more))[1]
    job.call(0, "train")
    job.backward("", False)
    job.hooks[0](job.optimizers[0], (), {})
    seen.append(lanes.current)
    assert seen == [FORWARD, OPTIMIZER]
    assert lanes.spent[BACKWARD] > 0


def test_an_evaluation_before_the_first_step_takes_no_more_than_its_own_time():
    job = Job()
    hour = 3_600_000_000_000
    job.watch.lanes.last -= hour  # which is forgotten
    job.watch.lanes.began -= hour
    job.call(0, "no_grad")
    job.call(0, "train")
    spent = job.watch.lanes.spent
    assert min(spent) == 0
    assert 0 < spent[EVALUATION] < hour
    assert spent[HOST] < hour


@pytest.mark.parametrize("where", ["another thread", "a batch"])
def test_calls_that_are_no_part_of_a_step_are_let_through(where):
    job = _quick_job()
    before = job.state()

    def calls():
        job.call(0, "train")
        job.backward("", False)
        job.step(0, False)

    if where == "another thread":
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
        assert job.models[0].calls[-1] == (torch.Size([1, 2]), 2)
        assert job.state()[:6] == before[:6]
    else:
        job.watch.lanes.current = INPUT
        job.call(0, "train")
        assert job.watch.models[0].calls == before[4][0][0]


def test_what_fails_fails_as_without():
    job = _quick_job()
    with pytest.raises(RuntimeError, match="shapes"):
        job.models[0](torch.ones(1, 3))
    with pytest.raises(TypeError, match="wrong"):
        job.models[0](torch.ones(1, 2), wrong=1)
    with pytest.raises(TypeError):
        type(job.models[0]).__call__()
    job.failing = True
    with pytest.raises(ValueError, match="no gradient"):
        job.autograd.backward(None)
    lanes = job.watch.lanes
    assert not lanes.is_inside
    assert lanes.current != BACKWARD


def test_they_look_like_what_they_stand_for():
    job = _quick_job()
    owner = type(job.models[0])
    assert type(vars(owner)["__call__"]).__name__ == "ForwardHook"
    assert owner.__call__.__wrapped__ is nn.Module.__call__
    assert job.autograd.backward.__wrapped__ is not None
    bound = job.models[0].__call__
    assert bound(torch.ones(3, 2)).shape == (3, 2)
    assert super(owner, job.models[0]).__call__(torch.ones(3, 2)).shape == (3, 2)
    assert owner.__call__(job.models[0], x=torch.ones(4, 2)).shape == (4, 2)


def test_the_hooks_in_python_are_back_before_anything_is_traced():
    job = _quick_job()
    quick, owner = job.watch.quick, type(job.models[0])
    others = owner.__call__, job.autograd.backward, *job.hooks.values()
    seen = []

    def backend(graph, inputs):
        seen.append(quick.is_on)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert seen == [False]
    now = owner.__call__, job.autograd.backward, *job.hooks.values()
    assert not set(others) & set(now)
    quick.begin()
    assert not quick.is_on  # never again
    job.call(0, "train")
    job.backward("", False)
    job.step(0, False)
    assert job.watch.optimizers[0].backwards == {1: 7}


def test_who_has_taken_the_place_since_keeps_it():
    job = Job()
    theirs = nullcontext
    job.autograd.backward = theirs
    job.watch.quick.begin()
    assert job.autograd.backward is theirs
    job.watch.quick.renew()
    assert job.autograd.backward is theirs


def test_something_compiled_before_keeps_them_away(monkeypatch):
    monkeypatch.setattr(quick_hooks, "is_anything_compiled", lambda: True)
    job = Job()
    job.watch.quick.begin()
    assert not job.watch.quick.is_on


def test_they_are_freed_with_their_watch():
    job = _quick_job()
    gone = ref(job.watch), ref(job.models[0])
    del job
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize("arguments", [(), (1, 2, 3), (None, print, print)])
def test_a_hook_wants_a_clock(arguments):
    from flatout.kernels import _clock

    with pytest.raises(TypeError):
        _clock.BackwardHook(*arguments)
    with pytest.raises(TypeError):
        _clock.ForwardHook(*arguments, {}, print)
    with pytest.raises(TypeError):
        _clock.StepHook(*arguments, print)


def test_a_torch_that_traces_in_unknown_ways_gets_no_hooks_in_c(monkeypatch):
    seen = []
    monkeypatch.setattr(quick_hooks, "when_imported", lambda name, hook: seen.append(hook))
    quick_hooks._watch_tracing.cache_clear()
    quick = Quick(Clock())
    seen[0](SimpleNamespace())
    quick.begin()
    assert not quick.is_on
    quick_hooks._watch_tracing.cache_clear()
