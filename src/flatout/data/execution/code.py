"""What a user's code is, as far as two processes can agree on it: for a resume to compare.

Unlike a name in `digests`, this reads nothing that the same script may make differently when it
runs again: of an object it takes the code that its class runs, and the values that its constructor
was given. What comes from an installed library is known by its name alone, so that an upgrade is no
other job.
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

from flatout.data.execution.digests import PLAIN_COUNTS, code_words, content_digest, digest_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Methods that others call; what these call by name is looked at too.
_ENTRIES = (
    "__init__", "__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "forward",
    "call", "build", "update", "compute", "update_state", "result",
)  # fmt: skip
# What each run, rank or machine may have another value of.
_OWN = (
    "rank", "local_rank", "num_replicas", "world_size", "device", "num_workers", "seed", "id",
    "uuid", "fingerprint", "cache_dir", "generator", "rng",
)  # fmt: skip
# The seeds of layers that draw, and numbers that differ by rank, are no architecture.
_UNTOLD = ("seed", "device", "dtype", "rank", "world_size")
_DEEPEST = 8
_LONGEST = 1_000


def code_digest(thing: Any) -> str:
    """16 hex digits over a function's, class's or object's code and what it was made with.

    Looked at are code, constants, defaults, what a function has closed over, functions and plain
    values that it reads from global names, and of objects the arguments of their constructors.
    """
    return digest_of(*_words(thing, frozenset()))


def arguments_of(thing: Any) -> dict[str, Any]:
    """What an object's constructor was given, as far as attributes of the same names show."""
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
    """Whether a function or class comes from Python, an installed package, or Flatout."""
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
        except ValueError:  # not filled yet
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
    """Global and attribute names that a function reads, in it and in functions within it."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(names_in(constant)))
    return names.keys()


def words_of(value: Any) -> str:
    """A value for people: what is long or cannot be told shortly, by its kind."""
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
    """What an object was made with, for people; without paths."""
    given = {k: v for k, v in arguments_of(thing).items() if k not in _UNTOLD}
    words = {name: words_of(value) for name, value in given.items()}
    # A path may be another one in each run, or on each machine.
    return ", ".join(f"{name}={value}" for name, value in words.items() if os.sep not in value)
