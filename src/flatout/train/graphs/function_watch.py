"""Detection of changes in all values that a user's function reads, which may change its result.

A recorded step does not run Python again. So the values of all names that the code of a loss reads
are recorded, including names read by the functions that the loss calls. Before each step the
present values are compared with them.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from flatout.data import is_library

# Functions with effects at each call, which a recorded step would not repeat.
_ACTS = (print, open, input, next, setattr, delattr, exec, eval)
_WRITES = frozenset(["STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR"])
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class FunctionWatch:
    """Watches the values that a function reads in addition to its arguments.

    Attributes:
        modules: modules that the function calls.
    """

    def __init__(self, function: Any) -> None:
        self.modules: list[nn.Module] = []
        self._known: list[tuple[Any, str, Any]] = []
        self._seen: set[int] = set()
        self._look("itself", function)

    def holds(self) -> bool:
        """Return whether all values that the function reads are unchanged."""
        return all(_read(holder, name) is value for holder, name, value in self._known)

    def _look(self, name: str, value: Any) -> None:
        if id(value) in self._seen or _stays(value):
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self.modules += value.modules()
        elif isinstance(value, (tuple, frozenset)):
            for part in value:
                self._look(name, part)
        elif isinstance(value, FunctionType):
            self._look_into(value)
        else:
            raise ValueError(
                f"it reads {name}, a {type(value).__name__}, whose changes cannot be detected"
            )

    def _look_into(self, function: FunctionType) -> None:
        if written := _written(function.__code__):
            raise ValueError(f"it writes to {written}")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        defaults = {**(function.__kwdefaults__ or {})}
        reads: list[tuple[Any, str]] = [(cell, name) for name, cell in cells]
        reads += [(function.__globals__, n) for n in _names(function.__code__)]
        for name, value in [*defaults.items(), ("a default", function.__defaults__ or ())]:
            self._look(name, value)
        for holder, name in reads:
            value = _read(holder, name)
            if any(value is act for act in _ACTS):
                raise ValueError(f"it calls {name}")
            self._known.append((holder, name, value))
            self._look(name, value)


def _stays(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return is_library(_Named(value.__name__))
    is_code = isinstance(value, type) or callable(value)
    return isinstance(value, (*_PLAIN, torch.Tensor)) or (
        is_code and not isinstance(value, nn.Module) and is_library(value)
    )


class _Named:
    """A stand-in for a module, with the attribute that `is_library` reads."""

    def __init__(self, name: str) -> None:
        self.__module__ = name


def _written(code: CodeType) -> str:
    for step in dis.get_instructions(code):
        is_outer = step.opname == "STORE_DEREF" and step.argval in code.co_freevars
        if is_outer or step.opname in _WRITES:
            return str(step.argval) if step.argval is not None else "an element of something"
    return next(filter(None, (_written(c) for c in code.co_consts if isinstance(c, CodeType))), "")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


def _read(holder: Any, name: str) -> Any:
    if isinstance(holder, dict):  # co_names includes names of attributes, too
        return holder.get(name, getattr(builtins, name, None))
    try:
        return holder.cell_contents
    except ValueError:
        return None
