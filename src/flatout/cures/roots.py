"""The outermost modules that an optimizer steps: what cures of a model wrap."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any
from weakref import ref

from flatout.cures.record import is_on
from flatout.cures.steps import Steps
from flatout.observe.compiling import is_anything_compiled
from flatout.observe.model_facts import unwrapped

Call = Callable[..., Any]
"""A call of a module: `call(module, *args, **kwargs)`."""

Cure = Callable[[Any, tuple[Any, ...], dict[str, Any], Call], Call]
"""What a cure makes of a module's call, given the arguments of the first one."""

# After so many steps only the classes of the outermost modules are watched, as observing does.
_SEARCH_STEPS = 3


class Roots:
    """Wraps the calls of the outermost modules that an optimizer steps.

    A module is met at its first call after the optimizer was made; what a cure does to it is there
    before its first step.

    Args:
        torch: the module.
        steps: of the script.
        cures: in the order in which they are put around the call, the innermost first.
    """

    def __init__(self, torch: Any, steps: Steps, cures: list[Cure]) -> None:
        self._torch = torch
        self._steps = steps
        self._cures = cures
        self._inside = False
        self._calls: dict[int, tuple[ref[Any], Call]] = {}
        self._others: dict[int, tuple[ref[Any], int]] = {}
        self._original = torch.nn.Module.__call__
        self._everywhere = self._watched(self._original)
        self._narrowed: set[type] = set()
        self._until = -1
        self._searched = -1
        steps.after.append(self._after_step)
        torch.nn.Module.__call__ = self._everywhere

    def _watched(self, original: Call) -> Call:
        is_compiling, thread = self._torch.compiler.is_compiling, self._steps.thread

        @wraps(original)
        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._inside or get_ident() != thread or not is_on():
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                cured = self._call_of(module, args, kwargs)
                return (cured or original)(module, *args, **kwargs)
            finally:
                self._inside = False

        return call

    def _call_of(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        found = self._calls.get(id(module))
        if found is not None and found[0]() is module:
            return found[1]
        other = self._others.get(id(module))
        generation = self._steps.generation
        if other is not None and other[1] == generation and other[0]() is module:
            return None
        if not self._steps.owns(module.parameters()):
            self._others[id(module)] = (ref(module), generation)
            return None
        call: Call = self._original
        for cure in self._cures:
            call = cure(module, args, kwargs, call)
        self._calls[id(module)] = (ref(module), call)
        return call

    def _after_step(self) -> None:
        """Watching every class costs a third of a microsecond for each submodule and call."""
        if self._searched != self._steps.generation:
            self._searched = self._steps.generation
            self._until = self._steps.count + _SEARCH_STEPS
            if self._torch.nn.Module.__call__ is self._original:
                self._torch.nn.Module.__call__ = self._everywhere
        elif self._steps.count == self._until:
            self._narrow()

    def _narrow(self) -> None:
        if is_anything_compiled():
            return  # something is compiled, and would be compiled anew
        if self._torch.nn.Module.__call__ is not self._everywhere:
            return  # somebody else hooks there
        modules = [seen() for seen, _ in self._calls.values()]
        classes = {type(m) for module in modules for m in unwrapped(module)} - self._narrowed
        if any(owner.__call__ is not self._everywhere for owner in classes):
            return  # one has a call of its own, which ends in the one that is watched now
        self._torch.nn.Module.__call__ = self._original
        for owner in classes:
            owner.__call__ = self._watched(self._original)
        self._narrowed |= classes
