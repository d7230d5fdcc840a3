"""Detection of calls of compiled code: in this thread, at each call, before the code runs."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from flatout.models import before_compiled, left_before_compiled


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def compiled(seen=None):
    """Return a compiled function; `seen` gets the active function and dispatch modes."""

    def backend(graph, inputs):
        if seen is not None:
            seen.append((len(_get_current_function_mode_stack()), _get_current_dispatch_mode()))
        return graph.forward

    torch.compiler.reset()  # of one code, torch compiles a few functions and then no more
    return torch.compile(lambda x: x * 2 + 1, backend=backend)


def test_each_call_is_noticed_whether_or_not_it_compiles():
    function, calls = compiled(), []
    for _ in range(2):
        with before_compiled(lambda: calls.append(1)) as is_called:
            torch.ones(2).sin()
            assert not is_called()
            function(torch.ones(2))
            function(torch.ones(2))
            assert is_called()
    assert calls == [1, 1]
    module = torch.nn.Linear(2, 2)
    module.compile(backend="eager")
    with before_compiled() as is_called:
        module(torch.ones(1, 2))
    assert is_called()


def test_calls_of_other_threads_and_other_jobs_are_not_noticed():
    function = compiled()
    function(torch.ones(2))
    with before_compiled() as is_called:
        thread = threading.Thread(target=function, args=(torch.ones(2),))
        thread.start()
        thread.join()
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    assert not is_called()


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_a_mode_is_left_for_compiled_code_and_only_once(kind):
    seen = []
    function, mode = compiled(seen), kind()
    with left_before_compiled(mode) as is_left:
        torch.ones(2).sin()
        assert not is_left()
        function(torch.ones(2))
        assert is_left()
    assert seen == [(0, None)]
    assert _get_current_dispatch_mode() is None
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_modes_of_the_users_own_stay_on(kind):
    inner, function, seen = kind(), compiled(), []
    for mode in (Functions(), Operators()):
        with left_before_compiled(mode), inner:
            function(torch.ones(2))
            seen = [*_get_current_function_mode_stack(), _get_current_dispatch_mode()]
        assert inner in seen
        assert _get_current_dispatch_mode() is None
        assert not _get_current_function_mode_stack()


def test_a_torch_without_signs_of_compilation_counts_as_compiling(monkeypatch):
    monkeypatch.delattr(torch._dynamo.eval_frame, "_callback_from_stance")
    mode = Functions()
    with left_before_compiled(mode) as is_left:
        assert is_left()
        assert not _get_current_function_mode_stack()
