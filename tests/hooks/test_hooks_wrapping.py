"""Wrappers stand in the order that is written down, whatever comes first, and leave no trace."""

import operator
import sys
from functools import wraps
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.cures import record
from flatout.cures.ddp import Accumulation
from flatout.cures.evaluation import without_graph
from flatout.cures.steps import ScriptSteps
from flatout.cures.zero_grad import drop_gradients
from flatout.doctor.trials.recording import Record
from flatout.hooks import ORDER, wrap
from flatout.hooks.modules import ModuleCalls
from flatout.observe.backward import watch_backward
from flatout.observe.optimizers import StepFinder
from flatout.observe.watch import Watch
from flatout.unhooked import unhooked

KINDS = [kind for kind, _ in ORDER]


def naming(inner, name, calls):
    def call(*args):
        calls.append(name)
        return inner(*args)

    return call


class Plain:
    def act(self):
        return "acted"


def scalars(kind=torch.Tensor):
    return [torch.ones(()).as_subclass(kind) for _ in range(3)]


def test_a_tensor_is_no_sequence_while_its_brackets_are_wrapped_and_after():
    """C code would ask scalars for their length."""

    class Heir(torch.Tensor):
        pass

    calls = []
    hook = wrap(torch.Tensor, "__getitem__", "observe", naming, "observe", calls)
    try:
        assert torch.ones(3)[1:].tolist() == [1.0, 1.0]
        assert calls == ["observe"]
        for kind in (torch.Tensor, torch.nn.Parameter, Heir):
            assert torch.tensor(scalars(kind)).tolist() == [1.0, 1.0, 1.0]
    finally:
        hook.remove()
    assert "__getitem__" not in vars(torch.Tensor)
    for kind in (torch.Tensor, torch.nn.Parameter, Heir):
        assert torch.as_tensor(scalars(kind)).tolist() == [1.0, 1.0, 1.0]
    assert torch.ones(3)[1:].tolist() == [1.0, 1.0]


def test_what_is_a_sequence_stays_one_with_its_brackets_wrapped():
    class Rows:
        def __getitem__(self, number):
            if number == 2:
                raise IndexError
            return number

    hook = wrap(Rows, "__getitem__", "observe", naming, "observe", [])
    assert list(Rows()) == [0, 1]
    assert operator.getitem(Rows(), 1) == 1
    hook.remove()
    assert list(Rows()) == [0, 1]


class Below(Plain):
    pass


def test_the_order_has_a_reason_for_each():
    assert KINDS == ["ablation", "recording", "observe", "cures"]
    assert all(reason for _, reason in ORDER)


@pytest.mark.parametrize("comes", list(permutations(KINDS)))
def test_it_is_that_of_the_tuple_in_either_order(comes):
    owner, calls = SimpleNamespace(act=lambda: "acted"), []
    plain = owner.act
    hooks = {kind: wrap(owner, "act", kind, naming, kind, calls) for kind in comes}
    assert owner.act() == "acted"
    assert calls == KINDS
    for kind in comes:
        assert hooks[kind].remove()
        assert not hooks[kind].remove()
        calls.clear()
        owner.act()
        assert calls == [other for other in KINDS if other not in comes[: comes.index(kind) + 1]]
    assert owner.act is plain


def test_of_one_kind_the_later_ones_are_outside():
    owner, calls = SimpleNamespace(act=lambda: None), []
    for name in "abc":
        wrap(owner, "act", "cures", naming, name, calls)
    owner.act()
    assert calls == ["c", "b", "a"]


def test_another_kind_is_refused():
    with pytest.raises(KeyError):
        wrap(SimpleNamespace(act=print), "act", "others", naming)


EVENTS = st.lists(
    st.tuples(st.sampled_from([Plain, Below]), st.sampled_from(KINDS), st.booleans()), max_size=12
)


@given(EVENTS)
def test_a_class_and_those_below_it_are_wrapped_in_order_and_left_as_they_were(events):
    calls, hooks = [], {}
    plain = Plain.act
    for owner, kind, is_on in events:
        if is_on and (owner, kind) not in hooks:
            name = (owner.__name__, kind)
            hooks[owner, kind] = wrap(owner, "act", kind, naming, name, calls)
        elif not is_on and (owner, kind) in hooks:
            assert hooks.pop((owner, kind)).remove()
        for seen in (Plain, Below):
            calls.clear()
            assert seen().act() == "acted"
            owners = [Below, Plain] if seen is Below else [Plain]
            assert calls == [
                (owner.__name__, kind)
                for owner in owners
                for kind in KINDS
                if (owner, kind) in hooks
            ]
    for hook in hooks.values():
        assert hook.remove()
    assert Plain.act is plain
    assert "act" not in vars(Below)


def test_another_packages_wrapper_stays_where_it_is():
    owner, calls = SimpleNamespace(act=lambda: "acted"), []
    inner = wrap(owner, "act", "observe", naming, "observe", calls)
    theirs = owner.act = naming(owner.act, "theirs", calls)
    assert not inner.remove()
    inner.remake()
    assert owner.act is theirs
    outer = wrap(owner, "act", "cures", naming, "cures", calls)
    owner.act()
    assert calls == ["cures", "theirs", "observe"]
    assert outer.remove()
    assert owner.act is theirs


def test_one_that_copies_attributes_is_told_apart():
    owner = SimpleNamespace(act=lambda: "acted")
    hook = wrap(owner, "act", "observe", lambda inner: lambda: inner())

    @wraps(owner.act)
    def theirs():
        return "theirs"

    owner.act = theirs
    wrap(owner, "act", "cures", lambda inner: lambda: inner() + " and more")
    assert owner.act() == "theirs and more"
    assert not hook.remove()


def _file_of(call):
    """The part of the package that a wrapper is from."""
    return call.__code__.co_filename.rpartition("flatout/")[2]


@pytest.mark.parametrize("comes", list(permutations(("cures", "observe", "recording"))))
def test_backward_is_wrapped_in_order_by_all_rooms(comes, monkeypatch):
    plain = SimpleNamespace(backward=lambda *args, **kwargs: None)
    optimizer_module = SimpleNamespace(Optimizer=type("Optimizer", (), {"zero_grad": print}))
    monkeypatch.setitem(sys.modules, "torch.optim.optimizer", optimizer_module)
    seam = SimpleNamespace(
        **{name: getattr(torch, name) for name in ("compiler", "is_grad_enabled", "Tensor")},
        autograd=plain,
        nn=SimpleNamespace(Module=type("Module", (), {"zero_grad": print})),
    )

    def by_cures():
        record.begin({})
        steps = ScriptSteps({})
        without_graph(seam, steps)
        drop_gradients(seam, steps)
        ours = object.__new__(Accumulation)
        ours._steps, ours._seen = steps, {}
        wrap(plain, "backward", "cures", ours._noted)

    watch = Watch()
    by = {
        "cures": by_cures,
        "observe": lambda: watch_backward(seam, watch, StepFinder(watch)),
        "recording": lambda: Record(watch.lanes).watch_losses(seam),
    }
    for kind in comes:
        by[kind]()
    found, call = [], plain.backward
    while hasattr(call, "__wrapped__"):
        found.append(_file_of(call))
        call = call.__wrapped__
    assert found == [
        "doctor/trials/recording.py",
        "observe/backward.py",
        "cures/ddp.py",
        "cures/zero_grad.py",
        "cures/evaluation.py",
    ]


def test_calls_of_modules_are_searched_and_narrowed_by_two_rooms(monkeypatch):
    base = type("Module", (), {"__call__": lambda self: "called"})
    plain = base.__call__
    outer, inner = type("Outer", (base,), {}), type("Inner", (base,), {})
    seam, calls = SimpleNamespace(nn=SimpleNamespace(Module=base)), []
    rooms = {
        kind: ModuleCalls(seam, kind, lambda call, kind=kind: naming(call, kind, calls))
        for kind in ("cures", "observe")
    }

    def called(owner):
        calls.clear()
        assert owner()() == "called"
        return list(calls)

    for room in rooms.values():
        room.search()
    assert called(inner) == ["observe", "cures"]
    assert rooms["observe"].narrow({outer})
    assert (called(outer), called(inner)) == (["observe", "cures"], ["cures"])
    assert rooms["cures"].narrow({outer})
    assert (called(outer), called(inner)) == (["observe", "cures"], [])
    assert base.__call__ is plain
    rooms["observe"].search()
    assert called(inner) == ["observe"]
    assert rooms["observe"].narrow({outer, inner})
    assert (called(outer), called(inner)) == (["observe", "cures"], ["observe"])
    monkeypatch.setattr("flatout.hooks.modules.is_anything_compiled", lambda: True)
    rooms["cures"].search()
    assert not rooms["cures"].narrow({inner})
    assert called(inner) == ["observe", "cures"]


def test_within_unhooked_a_class_is_as_written_and_its_hooks_come_back():
    class Own(Plain):
        def act(self):
            return "own"

    class Inherits(Plain):
        pass

    calls, written = [], dict(vars(Own))
    hooks = [
        wrap(owner, "act", "cures", naming, owner.__name__, calls) for owner in (Own, Inherits)
    ]
    try:
        with unhooked():
            assert dict(vars(Own)) == written
            assert "act" not in vars(Inherits)
            assert (Own().act(), Inherits().act(), calls) == ("own", "acted", [])
        assert (Own().act(), Inherits().act()) == ("own", "acted")
        assert calls == ["Own", "Inherits"]
    finally:
        assert all(hook.remove() for hook in hooks)
    assert dict(vars(Own)) == written
