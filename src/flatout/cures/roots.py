"""Root modules: the outermost modules that an optimizer steps. Model cures wrap their calls."""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from threading import get_ident
from typing import Any
from weakref import ref

from flatout.cures.record import is_on
from flatout.cures.steps import ScriptSteps
from flatout.hooks import SEARCH_STEPS, ModuleCalls
from flatout.observe import unwrapped

Call = Callable[..., Any]
"""A call of a module: `call(module, *args, **kwargs)`."""

Cure = Callable[[Any, tuple[Any, ...], dict[str, Any], Call], Call]
"""Function of a cure: takes a module, its first call's arguments and a Call; returns a new Call."""


class Roots:
    """Wraps the calls of the outermost modules that an optimizer steps.

    A module is detected at its first call after the optimizer was made, so that cures apply before
    the module's first step.
    """

    def __init__(self, torch: Any, steps: ScriptSteps, cures: list[Cure]) -> None:
        self._torch = torch
        self._steps = steps
        self._cures = cures
        self._inside = False
        self._calls: dict[int, tuple[ref[Any], Call]] = {}
        self._others: dict[int, tuple[ref[Any], int]] = {}
        self._module_calls = ModuleCalls(torch, "cures", self._watched)
        self._module_calls.search()
        self._until = -1
        self._searched = -1
        steps.after.append(self._after_step)

    def end(self) -> None:
        """Remove the wrapper from all modules."""
        self._steps.after.remove(self._after_step)
        self._module_calls.end()

    def _watched(self, original: Call) -> Call:
        is_compiling, thread = self._torch.compiler.is_compiling, self._steps.thread

        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self._inside or get_ident() != thread or not is_on():
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                cured = self._call_of(original, module, args, kwargs)
                return (cured or original)(module, *args, **kwargs)
            finally:
                self._inside = False

        return call

    def _call_of(
        self, original: Call, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call | None:
        result = self._calls.get(id(module))
        if result is not None and result[0]() is module:
            return result[1]
        other = self._others.get(id(module))
        generation = self._steps.generation
        if other is not None and other[1] == generation and other[0]() is module:
            return None
        call, cures = original, self._cures
        if not self._steps.owns(module.parameters()):
            cures = self._steps.of_unstepped if generation else []
        for cure in cures:
            call = cure(module, args, kwargs, call)
        if call is original and cures is not self._cures:
            self._others[id(module)] = (ref(module), generation)
            return None
        self._calls[id(module)] = (ref(module), call)
        return call

    def _after_step(self) -> None:
        if self._searched != self._steps.generation:
            self._searched = self._steps.generation
            self._until = self._steps.count + SEARCH_STEPS
            self._module_calls.search()
        elif self._steps.count == self._until:
            modules = [item() for item, _ in self._calls.values()]
            classes = {type(m) for module in modules for m in unwrapped(module)}
            plain = unwrap(self._torch.nn.Module.__call__)
            # A class with its own __call__ calls the Module.__call__ that is wrapped now.
            if all(unwrap(owner.__call__) is plain for owner in classes):
                self._module_calls.narrow(classes)
