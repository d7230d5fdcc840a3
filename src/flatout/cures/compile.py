"""compute.compile: compiles a script's root modules once, for training."""

from __future__ import annotations

from typing import Any

from flatout.console import first_line
from flatout.cures.record import leave, took
from flatout.cures.roots import Call, Cure
from flatout.cures.steps import ScriptSteps
from flatout.observe import unwrapped

FIELD = "compute.compile"


def cure(torch: Any, steps: ScriptSteps) -> Cure:
    """Return the wrapper for calls of root modules."""
    return compiled


def compiled(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Call:
    """Compile a root module for train mode; in eval mode it runs as written, as in a Loop."""
    name = type(unwrapped(module)[-1]).__name__
    if _is_compiled(module):
        leave(FIELD, f"{name} is compiled already")
        return call
    module.compile()
    is_tried = False

    def in_training(module: Any, /, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_tried
        if not module.training:
            return _plain(module, args, kwargs, call)
        if is_tried:
            return call(module, *args, **kwargs)
        is_tried = True
        return _first(module, args, kwargs, call, name)

    return in_training


def _is_compiled(module: Any) -> bool:
    if any(type(outer).__name__ == "OptimizedModule" for outer in unwrapped(module)):
        return True
    return any(inner._compiled_call_impl is not None for inner in module.modules())


def _plain(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> Any:
    whole, module._compiled_call_impl = module._compiled_call_impl, None
    try:
        return call(module, *args, **kwargs)
    finally:
        module._compiled_call_impl = whole


def _first(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, name: str
) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    from flatout.data import random_state, set_random_state

    before = random_state()
    try:
        result = call(module, *args, **kwargs)
    except TorchDynamoException as error:
        module._compiled_call_impl = None
        set_random_state(before)
        leave(FIELD, f"{name} cannot be compiled: {first_line(error)}")
        return call(module, *args, **kwargs)
    took(FIELD, f"compiled {name}")
    return result
