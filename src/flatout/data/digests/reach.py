"""Objects that a user's Dataset, generator or function uses, and changes of their attributes.

Batches that are made ahead, or twice to be compared, must not depend on the time when they are
made.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import numpy as np
import torch

from flatout.data.digests.code import is_library, names_in

# Levels of held objects that are compared.
_DEPTH = 4
# Maximum number of attributes that are compared.
_MOST_ATTRIBUTES = 10_000
# Types of values that are compared by value.
_VALUES = (bool, int, float, str, bytes, type(None))


class Attributes:
    """The attributes of some objects, and of the objects in them, at one moment.

    Objects are compared by identity, tensors also by their version. Changes inside numpy arrays and
    other containers are not detected.
    """

    def __init__(self, *objects: Any) -> None:
        self._before = _all_of(objects)

    def changed(self, *objects: Any) -> str:
        """Return the first attribute that has changed, or ""."""
        now = _all_of(objects)
        for name in {**self._before, **now}:
            if name not in now or name not in self._before:
                return name
            if not _same(self._before[name], now[name]):
                return name
        return ""


def _all_of(objects: tuple[Any, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for item in objects:
        name = type(item).__name__
        _collect(item, name, result, _DEPTH)
        result[name] = (id(item), *result[name][1:])  # the result does not keep the object alive
    return result


def _collect(item: Any, name: str, result: dict[str, Any], depth: int) -> None:
    if len(result) >= _MOST_ATTRIBUTES:
        return
    version = getattr(item, "_version", None) if hasattr(type(item), "_version") else None
    size = len(item) if isinstance(item, (list, dict, set)) else None
    result[name] = (item, version if isinstance(version, int) else None, size)
    inner = getattr(item, "__dict__", None)
    if depth and isinstance(inner, dict) and not isinstance(item, type) and version is None:
        for attribute, value in inner.items():
            _collect(value, f"{name}.{attribute}", result, depth - 1)
    if depth and isinstance(item, (list, tuple)) and len(item) <= 64:
        for at, value in enumerate(item):
            if not isinstance(value, _VALUES):
                _collect(value, f"{name}[{at}]", result, depth - 1)


def _same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    if before[1:] != now[1:]:
        return False
    if isinstance(before[0], _VALUES) and type(before[0]) is type(now[0]):
        return bool(before[0] == now[0])
    return before[0] is now[0]


# Maximum number of objects that are visited.
_MOST = 10_000
# Maximum number of items of a container that are visited.
_LONGEST = 64
_PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, torch.dtype, type(None))
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# Generators of the process, which are seeded for each batch.
_GLOBAL = (random.random.__self__, np.random.mtrand._rand, torch.default_generator)  # type: ignore
_CODE = (
    type, FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType,
    WrapperDescriptorType, GetSetDescriptorType, MemberDescriptorType, CodeType, property,
    functools.cached_property, dict, list, tuple, set, frozenset,
)  # fmt: skip


def own_generator(thing: Any) -> str:
    """Return a sentence that names the random generator an object may own, or "" without one.

    Each reading of a sample changes the state of such a generator.
    """
    for item in _reached(thing):
        if isinstance(item, _GENERATORS) and not any(item is known for known in _GLOBAL):
            return f"{type(thing).__name__} draws from its own {type(item).__name__}"
    return ""


def bound_to_training(thing: Any) -> str:
    """Return a reason if results may depend on the time or on the thread of a call, else ""."""
    for item in _reached(thing):
        kind = type(item)
        if isinstance(item, (torch.nn.Module, torch.optim.Optimizer)) or _is_of_keras(kind):
            return f"it has a {kind.__name__} at hand, which training changes"
        if isinstance(item, threading.local) or kind.__module__ == "sqlite3":
            return f"it has a {kind.__name__} at hand, which belongs to one thread"
    return ""


def shared_by_fork(thing: Any) -> str:
    """Return a reason if forked processes would share something, such as an open file, else "".

    An object that cannot be pickled usually holds a resource of the system.
    """
    for item in _reached(thing):
        if isinstance(item, torch.Tensor):
            if item.device.type != "cpu":
                return f"it has a tensor on {item.device} at hand"
        elif not isinstance(item, _CODE):
            try:
                item.__reduce_ex__(4)
            except Exception:
                return f"it has a {type(item).__name__} at hand, which processes cannot share"
    return ""


def _is_of_keras(kind: type) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and issubclass(kind, (keras.Model, keras.optimizers.Optimizer))


def _reached(thing: Any) -> Iterator[Any]:
    todo: deque[Any] = deque([thing])
    visited: set[int] = set()
    while todo and len(visited) < _MOST:
        item = todo.popleft()
        if id(item) in visited or isinstance(item, (*_PLAIN, ModuleType)):
            continue
        visited.add(id(item))
        yield item
        todo.extend(_held(item))


def _held(item: Any) -> Iterator[Any]:
    if isinstance(item, torch.Tensor):
        return
    if isinstance(item, functools.partial):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, FunctionType):
        yield from _of_function(inspect.unwrap(item))
    elif isinstance(item, GeneratorType):
        yield from _of_frame(item.gi_frame, item.gi_code)
    elif isinstance(item, dict):
        yield from islice(item.values(), _LONGEST)
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from islice(item, _LONGEST)
    elif isinstance(item, type):
        yield from _of_class(item)
    else:
        yield type(item)
        yield from getattr(item, "__dict__", {}).values()


def _of_function(function: Any) -> Iterator[Any]:
    if not isinstance(function, FunctionType) or is_library(function):
        return
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the cell is not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _globals_of(function.__code__, function.__globals__)


def _of_frame(frame: FrameType | None, code: CodeType) -> Iterator[Any]:
    if frame is not None:  # a generator that has ended has no frame
        yield from frame.f_locals.values()
        yield from _globals_of(code, frame.f_globals)


def _of_class(kind: type) -> Iterator[Any]:
    for cls in kind.__mro__:
        if not is_library(cls):
            for value in vars(cls).values():
                yield getattr(value, "__func__", getattr(value, "fget", value))


def _globals_of(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    yield from (names[name] for name in names_in(code) if name in names)
