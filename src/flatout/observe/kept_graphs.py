"""Variables of the script that keep graphs of past steps alive: lists of losses, running sums.

Backward frees the tensors that a graph has saved, so the memory of small graphs grows too slowly to
be measured in a short observation. Therefore the variables themselves are inspected.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any

from flatout.observe.graphs import graph_of, line_that_fills, nodes_of, users_frames
from flatout.observe.observation import KeptGraphs, Site
from flatout.observe.sites import is_users
from flatout.observe.watch import Watch

# Steps of each training after which variables are inspected.
_LOOKS = (5, 9, 13, 17)
# Minimum number of these inspections in which a variable must hold more than before.
_FEWEST = 3
# _NAMES: maximum number of names of a frame; _ENTRIES: maximum number of entries of a dict or
# attributes of an object.
_NAMES, _ENTRIES = 300, 64
# Smallest growth of a variable between two inspections, in list entries or graph nodes per step.
_EACH = 0.5
_CONTAINERS = (list, deque)
_SUM = "AddBackward0"


@dataclass
class _Held:
    """Content of a variable at one inspection.

    Attributes:
        step: number of steps of the training.
        value: the list of tensors; None where the variable is a sum.
        first: first entry of the list, or last node of the sum's graph.
        size: number of entries, or of graph nodes.
    """

    step: int
    value: Any
    first: Any
    size: int


class KeptLosses:
    """Inspection of the variables of the script's frames in a few steps.

    Attributes:
        found: variables that hold more graphs with each step.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._renew()
        for step in _LOOKS:
            watch.at_each(step, self._look)
        watch.on_renewal.append(self._renew)
        watch.on_training.append(self._begin_again)

    def _renew(self) -> None:
        self.found: list[KeptGraphs] = []
        self._told: list[KeptGraphs] = []  # findings in earlier trainings
        self._held: dict[tuple[CodeType, str], list[_Held]] = {}

    def _begin_again(self) -> None:
        self._told = list(self.found)
        self._held = {}

    def _look(self) -> None:
        step = self._watch.lanes.steps - self._watch.began
        before, self._held = self._held, {}
        places = {}
        for frame in users_frames(sys._getframe()):
            for path, value, adds_in in values_of(frame):
                key = frame.f_code, path
                looks = before.get(key, [])
                held = self._of(step, value, looks[-1] if looks else None)
                if held is not None:
                    self._held[key] = [*looks, held]
                    places[key] = adds_in
        # Updated at each inspection, since slow steps may end the observation before the last
        # inspection.
        self.found = list(self._told)
        for key, adds_in in places.items():
            if len(self._held[key]) >= _FEWEST:
                self._tell(key[1], self._held[key][-1], adds_in())
        if step >= _LOOKS[-1]:
            self._held.clear()

    def _of(self, step: int, value: Any, before: _Held | None) -> _Held | None:
        if isinstance(value, _CONTAINERS):
            if len(value) < 2 or not self._has_graph(value[0]) or not self._has_graph(value[-1]):
                return None
            held, goes_on = _Held(step, value, value[0], len(value)), True
            if before is not None:
                goes_on = before.value is value and before.first is value[0]
        elif self._has_graph(value) and value.grad_fn.name() == _SUM and value.numel() == 1:
            graph = graph_of([value])
            held = _Held(step, None, value.grad_fn, len(graph))
            goes_on = before is None or before.first in graph
        else:
            return None
        more = 1.0 if before is None else _EACH * (step - before.step)
        grows = before is None or held.size - before.size >= more
        return held if goes_on and grows else None

    def _has_graph(self, value: Any) -> bool:
        return type(value) is self._torch.Tensor and value.grad_fn is not None

    def _tell(self, name: str, held: _Held, site: Site | None) -> None:
        if site is not None and any(item.site == site for item in self.found):
            return  # the same list or sum under another name
        is_list = held.value is not None
        nodes = nodes_of(held.value) if is_list else held.size
        steps = held.size if is_list else held.step
        self.found.append(KeptGraphs(name, site, is_list, steps, nodes))


def values_of(frame: FrameType) -> Iterator[tuple[str, Any, Callable[[], Site | None]]]:
    """Yield the variables of a frame, with the entries of their dicts and objects.

    Each item has the name, the value, and a function that finds the line that adds to it.
    """
    for name, value in list(_names_in(frame).items())[:_NAMES]:
        if name.startswith("__"):
            continue
        adds = partial(line_that_fills, frame, name)
        yield name, value, adds
        if isinstance(value, dict):
            for key, inner in list(value.items())[:_ENTRIES]:
                yield f"{name}[{key!r}]", inner, adds
        elif _is_of_users(type(value)):
            for key, inner in list(vars(value).items())[:_ENTRIES]:
                adds = partial(_line_in_class, type(value), key)
                yield f"{name}.{key}", inner, adds
                if isinstance(inner, dict):
                    for at, part in list(inner.items())[:_ENTRIES]:
                        yield f"{name}.{key}[{at!r}]", part, adds


def _names_in(frame: FrameType) -> dict[str, Any]:
    outer, used = frame.f_globals, frame.f_code.co_names
    return {name: outer[name] for name in used if name in outer} | frame.f_locals


def _is_of_users(owner: type) -> bool:
    module = sys.modules.get(owner.__module__)
    is_plain = owner.__dictoffset__ != 0 and not issubclass(owner, type)
    return is_plain and is_users(getattr(module, "__file__", None) or "<>")


def _line_in_class(owner: type, attribute: str) -> Site | None:
    name = rf"self\.{re.escape(attribute)}\b"
    adds = re.compile(
        rf"{name}[\w.]*(\[.*\])?(\.(append|extend|add|insert)\(|\s*\+=)|{name}\s*=.*{name}"
    )
    for method in vars(owner).values():
        code = getattr(method, "__code__", None)
        if code is None or not is_users(code.co_filename):
            continue
        try:
            lines, first = inspect.getsourcelines(code)
        except OSError:
            continue
        for at, line in enumerate(lines, first):
            if adds.search(line):
                return Site(code.co_filename, at)
    return None
