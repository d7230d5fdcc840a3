"""Random generators of a loader's worker process and of its dataset.

Two workers that draw from equal generator states apply the same augmentations to different samples.
Therefore the states are recorded before the first batch and after each of the first two. Nothing is
drawn.
"""

from __future__ import annotations

import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

# Number of first batches after which states are recorded.
_BATCHES = 2
# _DEPTH: maximum number of levels of references from a dataset; _MEMBERS: maximum number of members
# of each object; _OBJECTS: maximum number of objects that are inspected.
_DEPTH, _MEMBERS, _OBJECTS = 4, 64, 1000
_OF_PROCESS = ("torch", "random", "numpy")


class Draws:
    """States of one worker's generators.

    Attributes:
        states: for each point in time (before the first batch, then after each batch), a hash of
            each generator's state by the generator's name.
    """

    def __init__(self, dataset: Any) -> None:
        self._own = dict(generators_of(dataset))
        self.states = [self._now()]

    def look(self) -> None:
        """Record the states after a batch."""
        if len(self.states) <= _BATCHES:
            self.states.append(self._now())

    def _now(self) -> dict[str, int]:
        own = {name: number_of_state(generator) for name, generator in self._own.items()}
        return states_of_process() | own


def states_of_process() -> dict[str, int]:
    """Return a hash of the state of each random generator of this process."""
    torch: Any = sys.modules["torch"]
    result = {
        "torch": _number(torch.get_rng_state().numpy().tobytes()),
        "random": _number(random.getstate()),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        result["numpy"] = _number(numpy.random.get_state(legacy=False))
    return result


def number_of_state(generator: Any) -> int:
    """Return a hash of the state of a generator of NumPy, torch or `random`."""
    return _number(_state(generator))


def drawn_alike(workers: list[list[dict[str, int]]]) -> tuple[str, list[int]]:
    """Return the used generator whose states are most alike in all workers, and these states.

    A generator of the dataset counts only where two workers drew the same twice, since it may be
    seeded again for each sample.
    """
    result: list[tuple[str, list[int]]] = []
    for name in workers[0][0]:
        states = [[at[name] for at in worker if name in at] for worker in workers]
        if all(len(set(of_worker)) < 2 for of_worker in states):
            continue
        if name in _OF_PROCESS:
            result.append((name, [of_worker[0] for of_worker in states]))
            continue
        # A worker that drew less than twice counts as different from the other workers.
        alike = [
            _number(of_worker) if len(set(of_worker)) > _BATCHES else -at
            for at, of_worker in enumerate(states, 1)
        ]
        result.append((name, alike))
    return min(result, key=lambda value: len(set(value[1])), default=("", []))


def generators_of(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the generators within a dataset, its transforms and the functions that it calls."""
    return reached_from(dataset, _is_generator)


def reached_from(dataset: Any, is_kind: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield objects of a kind that a dataset, its transforms and functions refer to, by name."""
    todo: list[tuple[str, Any, int]] = [("dataset", dataset, 0)]
    method = getattr(type(dataset), "__getitem__", None) or getattr(type(dataset), "__iter__", None)
    if isinstance(method, FunctionType):
        todo += [(name, value, 1) for name, value in _seen_by(method)]
    known: set[int] = set()
    while todo and len(known) < _OBJECTS:
        name, value, depth = todo.pop(0)
        if id(value) in known:
            continue
        known.add(id(value))
        if is_kind(value):
            yield name, value
        elif depth < _DEPTH:
            todo += [(name + part, inner, depth + 1) for part, inner in _parts(value)]


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        inside = list(enumerate(value)) if len(value) <= _MEMBERS else []
        return [(f"[{at}]", inner) for at, inner in inside]
    if isinstance(value, dict):
        inside = list(value.items()) if len(value) <= _MEMBERS else []
        return [(f"[{key!r}]", inner) for key, inner in inside]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, FunctionType):
        return [(f".{name}", inner) for name, inner in _seen_by(value)]
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return []
    named = [*vars(value).items(), *_of_class(type(value))]
    return [(f".{name}", inner) for name, inner in named[:_MEMBERS]]


def _of_class(owner: type) -> Iterator[tuple[str, Any]]:
    for base in owner.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) or _is_generator(value):
                yield name, value


def _seen_by(function: FunctionType) -> list[tuple[str, Any]]:
    names = function.__code__.co_names
    result = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            result.append((name, cell.cell_contents))
        except ValueError:  # the closure's variable is not yet assigned
            continue
    return [(name, value) for name, value in result if not isinstance(value, type(sys))]


def _is_generator(value: Any) -> bool:
    if isinstance(value, sys.modules["torch"].Generator):
        return bool(value.device.type == "cpu")
    numpy: Any = sys.modules.get("numpy")
    numpys = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, *numpys))


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    state = generator.get_state()
    return state.numpy().tobytes() if hasattr(state, "numpy") else state


def _number(state: Any) -> int:
    return zlib.crc32(pickle.dumps(state))
