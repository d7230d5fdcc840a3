"""Digests of a user's code, equal in all processes, which a resume compares.

Unlike `digests.function_name`, they ignore objects that the same script may make differently in
another run. An object is represented by the code of its class and its constructor's arguments.
Code of an installed library counts by its name alone, so that an upgrade does not change a digest.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch

from flatout.data.digests.digests import PLAIN_COUNTS, code_words, content_digest, digest_of

# Types of values whose content counts in a digest.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Methods that callers use. Methods that are called by these methods also count.
_ENTRIES = (
    "__init__", "__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "forward",
    "call", "build", "update", "compute", "update_state", "result",
)  # fmt: skip
# Names of arguments whose values may differ between runs, ranks or machines.
_OWN = (
    "rank", "local_rank", "num_replicas", "world_size", "device", "num_workers", "seed", "id",
    "uuid", "fingerprint", "cache_dir", "generator", "rng",
)  # fmt: skip
# Arguments that are not part of an architecture: seeds of layers, and values that differ by rank.
_UNTOLD = ("seed", "device", "dtype", "rank", "world_size")
# Levels of nested values that count.
_DEEPEST = 8
# Items up to which a container's items count; of a longer one, only the length counts.
_LONGEST = 1_000


def code_digest(thing: Any) -> str:
    """Return 16 hex digits over the code of a function, class or object, and its arguments.

    These count: code, constants, defaults, values of closures, functions and plain values that it
    reads from global names, and the constructor's arguments of objects.
    """
    return digest_of(*_words(thing, frozenset()))


def arguments_of(thing: Any) -> dict[str, Any]:
    """Return an object's constructor arguments, as far as attributes of the same names exist."""
    try:
        parameters = inspect.signature(type(thing).__init__).parameters
    except (TypeError, ValueError):
        return {}
    arguments = {}
    for name in list(parameters)[1:]:
        for attribute in (name, f"_{name}"):
            if attribute in getattr(thing, "__dict__", {}):
                arguments[name] = vars(thing)[attribute]
                break
    return arguments


def is_library(thing: Any) -> bool:
    """Return whether a function or class comes from Python, an installed package, or Flatout."""
    name = getattr(thing, "__module__", None) or ""
    if name.partition(".")[0] in ("builtins", "flatout"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name.partition(".")[0] in sys.stdlib_module_names and name != "__main__"
    return "site-packages" in file or "dist-packages" in file or file.startswith(_stdlib())


@functools.cache
def _stdlib() -> str:
    return sysconfig.get_path("stdlib") + os.sep


def _words(value: Any, visited: frozenset[int]) -> Iterator[str]:
    if len(visited) > _DEEPEST or id(value) in visited:
        yield "again"
        return
    visited = visited | {id(value)}
    if isinstance(value, _PLAIN):
        yield _plain_words(value) if PLAIN_COUNTS.get() else "plain"
    elif isinstance(value, np.generic):
        yield f"{value.dtype} {value!r}"
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield _array_words(value)
    elif isinstance(value, (tuple, list, dict, set, frozenset)):
        yield from _container_words(value, visited)
    elif isinstance(value, functools.partial):
        yield from _words((value.func, value.args, value.keywords), visited)
    elif inspect.ismethod(value):
        yield from _words(value.__func__, visited)
        yield from _words(value.__self__, visited)
    elif isinstance(value, FunctionType):
        yield from _function_words(value, visited)
    elif inspect.isclass(value):
        yield from _class_words(value, visited)
    elif inspect.ismodule(value) or inspect.isroutine(value):
        yield getattr(value, "__qualname__", value.__name__)
    else:
        yield from _class_words(type(value), visited)
        if not type(value).__module__.startswith("flatout."):
            given = arguments_of(value)
            yield from _words({k: v for k, v in given.items() if k not in _OWN}, visited)


def _plain_words(value: Any) -> str:
    is_path = isinstance(value, (str, bytes)) and (os.sep in str(value))
    return "a path" if is_path else repr(value)


def _array_words(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            return f"{value.dtype} {value.shape}"
        value = torch.from_numpy(np.ascontiguousarray(value))
    return content_digest(value)


def _container_words(value: Any, seen: frozenset[int]) -> Iterator[str]:
    yield f"{type(value).__name__} of {len(value)}"
    if len(value) > _LONGEST:
        return
    if isinstance(value, (set, frozenset)):
        yield from sorted("\0".join(_words(part, seen)) for part in value)
        return
    parts = (
        value if isinstance(value, (tuple, list)) else [x for pair in value.items() for x in pair]
    )
    for part in parts:
        yield from _words(part, seen)


def _function_words(function: Any, seen: frozenset[int]) -> Iterator[str]:
    function = inspect.unwrap(function)
    yield f"{function.__qualname__}"
    if is_library(function):
        return
    yield code_words(function.__code__)
    yield from _words((function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        try:
            yield from _words(cell.cell_contents, seen)
        except ValueError:  # the cell is not filled yet
            yield "empty"
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, (*_PLAIN, FunctionType)) and value is not None:
            yield name
            yield from _words(value, seen)


def _class_words(kind: type, seen: frozenset[int]) -> Iterator[str]:
    yield f"{kind.__qualname__}"
    for cls in kind.__mro__:
        if is_library(cls):
            continue
        todo, done = [name for name in _ENTRIES if name in vars(cls)], set()
        while todo:
            name = todo.pop()
            method = vars(cls).get(name)
            method = getattr(method, "fget", None) or getattr(method, "__func__", method)
            if name in done or not isinstance(method, FunctionType):
                continue
            done.add(name)
            yield name
            yield from _function_words(method, seen)
            todo += sorted(names_in(method.__code__) & vars(cls).keys())


def names_in(code: CodeType) -> Any:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(names_in(constant)))
    return names.keys()


def words_of(value: Any) -> str:
    """Return a value as text for the user; long or complex values are named by their type."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (tuple, list)) and len(value) <= 10:
        return f"[{', '.join(map(words_of, value))}]"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return str(getattr(value, "words", type(value).__qualname__))


def arguments_words(thing: Any) -> str:
    """Return an object's constructor arguments as text for the user, without paths."""
    given = {k: v for k, v in arguments_of(thing).items() if k not in _UNTOLD}
    words = {name: words_of(value) for name, value in given.items()}
    # A path may differ between runs or machines.
    return ", ".join(f"{name}={value}" for name, value in words.items() if os.sep not in value)
