"""Detection of code that torch.compile has compiled, and control over how it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

# A private function of torch that compiled code calls right before each run.
_BEGINS = "_callback_from_stance"
_Mode = TorchFunctionMode | TorchDispatchMode


@contextmanager
def before_compiled(act: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Call `act` once: before this thread first calls compiled code within this context.

    Yields:
        a function that returns whether this thread has called compiled code, or may have.
    """
    # torch.compile imports this module, so if it is not imported, no code was compiled.
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    begin, thread = getattr(dynamo, _BEGINS, None), get_ident()
    is_called = dynamo is not None and begin is None  # a torch version without this function

    def act_and_begin(callback: Any) -> Any:
        nonlocal is_called
        if callback is not None and get_ident() == thread and not is_called:
            is_called = True
            act()
        return begin(callback)  # type: ignore[misc]

    if begin is None:
        yield lambda: is_called
        return
    setattr(dynamo, _BEGINS, act_and_begin)
    try:
        yield lambda: is_called
    finally:
        setattr(dynamo, _BEGINS, begin)


@contextmanager
def left_before_compiled(mode: _Mode) -> Iterator[Callable[[], bool]]:
    """Enter a mode of torch, and leave the mode before this thread first calls compiled code.

    Under the mode, code would be compiled in another way or not at all, and would round
    differently.

    Yields:
        a function that returns whether the mode was left.
    """
    is_on = False

    def leave() -> None:
        nonlocal is_on
        is_on = not _leave(mode)

    with before_compiled(leave) as is_called:
        if is_called():
            yield lambda: True
            return
        mode.__enter__()  # type: ignore[no-untyped-call]
        is_on = True
        try:
            yield lambda: not is_on
        finally:
            if is_on:
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _leave(mode: _Mode) -> bool:
    if isinstance(mode, TorchDispatchMode):
        # Another active mode of this kind prevents compilation anyway.
        is_last = _get_current_dispatch_mode() is mode
        if is_last:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return is_last
    later = []
    while (last := overrides._pop_mode()) is not mode:  # type: ignore[no-untyped-call]
        later.append(last)
    overrides._push_mode(mode)  # type: ignore[no-untyped-call]
    mode.__exit__(None, None, None)
    for other in reversed(later):
        overrides._push_mode(other)  # type: ignore[no-untyped-call]
    return True


def has_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it was compiled."""
    return any(map(is_compiled, model.modules()))


def is_compiled(module: nn.Module) -> bool:
    """Return whether this module itself was compiled."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Within this context, run the original code of a model that `model.compile()` has compiled."""
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled
