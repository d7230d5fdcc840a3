"""Check that a user's call does not affect training, by the state before and after it.

Weights, buffers, gradients, optimizer states, rates, modes and random states must be bitwise equal
after the call. They are compared by a sample of each tensor and by torch's version counter. Tensors
and arrays of the receiver and the arguments must be equal too, except single numbers. New tensors
may be added, as in a history, except tensors with the shape of a weight: they may be an average of
the weights.
"""

from __future__ import annotations

import builtins
import hashlib
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from threading import get_ident
from time import perf_counter_ns
from types import FrameType
from typing import Any

from flatout.observe.observation import Observation
from flatout.observe.replicas import number_of, random_bytes
from flatout.observe.rewriting import Rewriting
from flatout.observe.unused_calls import CALLS
from flatout.observe.watch import Watch

# _HOT: share of a step's time from which a line is hot; _MOST: maximum number of calls that are
# left out.
_HOT, _MOST = 0.03, 2
# _LOOKS: number of executions of each call that are checked; _LONGEST_NS: maximum nanoseconds of
# all checks together.
_LOOKS, _LONGEST_NS = 3, 1_500_000_000
# _DEPTH: levels of references that are followed from a call's arguments; _OBJECTS: maximum number
# of objects that are inspected.
_DEPTH, _OBJECTS = 3, 2000


def hot_calls(observation: Observation, code: Rewriting) -> list[list[int]]:
    """Return, for each of the hottest lines, the calls that contain it, innermost first."""
    whole = sum(ms or 0.0 for lane, ms in observation.lanes_ms.items() if lane != "evaluation")
    result = []
    for line in observation.lines:
        ms = line.ms - line.lanes_ms.get("evaluation", 0.0)
        if ms < _HOT * whole:
            continue
        places = [line.site, *line.callers]
        result.append(
            [
                number
                for place in places
                for number, call in enumerate(code.calls)
                if call.file == place.file and call.line <= place.line <= call.end_line
            ]
        )
    return [chain for chain in result if chain]


def outermost(chains: list[list[int]], clean: list[int]) -> list[int]:
    """Return the outermost call without effects of each chain, for the hottest lines."""
    chosen = [next((n for n in reversed(chain) if n in clean), None) for chain in chains]
    return [n for n in dict.fromkeys(chosen) if n is not None][:_MOST]


class SideEffects:
    """Check of some calls for effects on training.

    Attributes:
        changed: by call id, names of the state that the call has changed; "" where it has changed
            nothing.
    """

    def __init__(self, watch: Watch, code: Rewriting, numbers: list[int]) -> None:
        self._watch, self._code = watch, code
        self._looks = dict.fromkeys(numbers, 0)
        self._before: dict[int, dict[str, Any]] = {}
        self._begun: set[int] = set()
        self._took = 0
        self.changed: dict[int, str] = {}
        setattr(builtins, CALLS, self)

    def __getitem__(self, at: int) -> Any:
        """Check the state before and after a call of the script; replaces the list `makes`."""
        number, is_over = divmod(at, 2)
        if number not in self._looks or get_ident() != self._watch.lanes.thread:
            return self._code.makes[at]
        if self._looks[number] < _LOOKS and self._took < _LONGEST_NS:
            frame = sys._getframe(1)
            self._watch.aside(lambda: self._look(number, bool(is_over), frame))
        return self._code.makes[at]

    @property
    def is_done(self) -> bool:
        """True once enough executions were checked."""
        return all(looks >= _LOOKS for looks in self._looks.values()) or self._took >= _LONGEST_NS

    def end(self) -> list[int]:
        """Stop checking; return the calls that were checked and have changed nothing."""
        setattr(builtins, CALLS, self._code.makes)
        return [n for n, looks in self._looks.items() if looks and not self.changed.get(n)]

    def _look(self, number: int, is_over: bool, frame: FrameType) -> None:
        if is_over and number not in self._begun:
            return  # the call began before the check
        began = perf_counter_ns()
        self._begun.add(number)
        before = self._before.pop(number, None) if is_over else None
        different = ["what could not be seen"]
        try:
            state = self._state(number, frame)
            if not is_over:
                self._before[number] = state
            elif before is not None:
                different = [name for name in state if _differs(before[name], state[name])]
        finally:
            if is_over:
                self._begun.remove(number)
                self._looks[number] += 1
                self.changed[number] = self.changed.get(number) or ", ".join(different)
            self._took += perf_counter_ns() - began

    def _state(self, number: int, frame: FrameType) -> dict[str, Any]:
        torch: Any = sys.modules["torch"]
        modules = [one for model in self._watch.models if (one := model.ref()) is not None]
        weights = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        optimizers = [
            one for optimizer in self._watch.optimizers if (one := optimizer.ref()) is not None
        ]
        groups = [
            group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ())
        ]
        states = [
            part
            for optimizer in optimizers
            for state in getattr(optimizer, "state", {}).values()
            for part in (state.values() if isinstance(state, dict) else ())
            if torch.is_tensor(part)
        ]
        known = {id(tensor) for tensor in weights}
        given = [item for name in self._code.calls[number].reads for item in _value(name, frame)]
        tensors = [t for t in _tensors_in(torch, given) if id(t) not in known]
        shapes = {tuple(t.shape) for t in weights if t.numel() > 1}
        kept = [t for t in tensors if tuple(t.shape) in shapes]
        others = [t for t in tensors if t.numel() > 1 and tuple(t.shape) not in shapes]
        return {
            "weights": _facts(weights),
            "gradients": _facts([t.grad for t in weights if t.grad is not None]),
            "optimizer state": _facts(states),
            "rates": repr([{k: v for k, v in group.items() if k != "params"} for group in groups]),
            "modes": [part.training for module in modules for part in module.modules()],
            "random numbers": _random_states(torch),
            "steps": (self._watch.lanes.steps, self._watch.lanes.backwards),
            "batches": sum(loader.batches for loader in self._watch.loaders),
            "tensors like weights": _facts(kept),
            "tensors that it keeps": Kept({id(item): _facts([item]) for item in others}),
            "arrays that it keeps": Kept(_arrays_in(given)),
            "settings": (torch.is_grad_enabled(), torch.get_num_threads()),
        }


class Kept(dict[int, Any]):
    """State of the tensors or arrays that an object holds, by id.

    Entries may be added later, but no entry may change or be removed.
    """


def _differs(before: Any, after: Any) -> bool:
    if isinstance(before, Kept):
        return any(after.get(key) != value for key, value in before.items())
    return bool(before != after)


def _facts(tensors: list[Any]) -> tuple[list[tuple[int, int]], int]:
    return [(id(tensor), tensor._version) for tensor in tensors], number_of(tensors)


def _random_states(torch: Any) -> str:
    parts = [random_bytes(torch), repr(random.getstate()).encode()]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        parts.append(repr(numpy.random.get_state()[1:]).encode())
        parts.append(numpy.random.get_state()[1].tobytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _value(name: str, frame: FrameType) -> Iterator[Any]:
    first, *names = name.split(".")
    with suppress(KeyError, AttributeError, TypeError):
        value = frame.f_locals[first] if first in frame.f_locals else frame.f_globals[first]
        for one in names:
            value = vars(value)[one]
        yield value


def _tensors_in(torch: Any, roots: list[Any]) -> list[Any]:
    result: dict[int, Any] = {}
    for item in _parts_of(roots):
        if torch.is_tensor(item):
            result[id(item)] = item
        elif isinstance(item, torch.nn.Module):
            result |= {id(t): t for t in (*item.parameters(), *item.buffers())}
    return list(result.values())


def _arrays_in(roots: list[Any]) -> dict[int, int]:
    numpy: Any = sys.modules.get("numpy")
    return {
        id(item): zlib.crc32(numpy.ascontiguousarray(item).view(numpy.uint8))
        for item in _parts_of(roots)
        if numpy is not None
        and isinstance(item, numpy.ndarray)
        and item.size > 1
        and not item.dtype.hasobject
    }


def _parts_of(roots: list[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    todo = [(root, 0) for root in roots]
    while todo and len(seen) < _OBJECTS:
        node, depth = todo.pop()
        if id(node) in seen or isinstance(node, (str, bytes, int, float, type(sys))):
            continue
        seen.add(id(node))
        yield node
        if depth < _DEPTH:
            if isinstance(node, dict):
                parts = list(node.values())
            elif isinstance(node, (list, tuple, set, deque)):
                parts = list(node)
            else:
                parts = list(getattr(node, "__dict__", {}).values())
            todo += [(part, depth + 1) for part in parts[:_OBJECTS]]
