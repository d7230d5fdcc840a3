"""Search for the line that keeps graphs of past steps alive, made only where memory grows."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from time import thread_time_ns
from types import FrameType
from typing import Any

from flatout.observe.meters import Meters
from flatout.observe.observation import Site
from flatout.observe.sites import is_users
from flatout.observe.watch import Watch

# _LOOKS: steps in which graph nodes are counted (a count is a "look"); _GROWN_MB: minimum MB of
# steady memory growth for a count; _NODES: maximum number of graph nodes that are counted.
_LOOKS = (24, 48, 96, 192)
_GROWN_MB = 3.0
_NODES = 50_000
# Maximum number of tensors whose referrers are searched; the same for containers.
_ASKED = 8
# Time to find the referrers of objects, as a multiple of the time to find the objects.
_LOOKS_TO_ASK = 4
# _FEWEST: minimum number of looks to detect growth; _NS_A_BLOCK: estimated ns of a look per
# allocated block; _CHEAP_NS: ns of the longest look that is always made, until _FEWEST looks are
# made.
_FEWEST = 2
_NS_A_BLOCK, _CHEAP_NS = 40, 150_000_000
_WAITS = "graphs: so many objects are alive that looking through them costs too much"
_CONTAINERS = (list, tuple, dict, set, deque)


class Graphs:
    """Counter of the graph nodes that are alive.

    Attributes:
        nodes: [step, number of nodes] of each look.
        site: the user's line that keeps the nodes alive; None where unknown.
    """

    def __init__(self, torch: Any, watch: Watch, meters: Meters) -> None:
        self._torch = torch
        self._watch = watch
        self._meters = meters
        self.nodes: list[tuple[int, int]] = []
        self.site: Site | None = None
        self._took = 0
        watch.on_renewal.append(self._forget)
        for step in _LOOKS:
            watch.at(step, self._look)

    def _forget(self) -> None:
        self.nodes.clear()
        self.site = None

    def _look(self) -> None:
        if self._meters.grown_mb() < _GROWN_MB:
            return
        steps = self._watch.lanes.steps
        # With millions of objects, a look takes as long as many short steps.
        takes = self._took or sys.getallocatedblocks() * _NS_A_BLOCK
        is_cheap = len(self.nodes) < _FEWEST and takes <= _CHEAP_NS
        if not is_cheap and not self._watch.affords(_LOOKS_TO_ASK * takes):
            self._watch.notes[_WAITS] = None
            self._watch.at(2 * steps, self._look)
            return
        self._watch.notes.pop(_WAITS, None)
        began = thread_time_ns()
        tensor = self._torch.Tensor
        kept = [
            item for item in gc.get_objects() if type(item) is tensor and item.grad_fn is not None
        ]
        self._took = thread_time_ns() - began
        self.nodes.append((steps, nodes_of(kept)))
        if len(self.nodes) > 1 and self.site is None and self.nodes[-1][1] > self.nodes[0][1]:
            self.site = self._keeper(kept)

    def _keeper(self, kept: list[Any]) -> Site | None:
        frames = list(users_frames(sys._getframe()))
        result = {id(holder) for holder in _holders(kept)}
        held = result | {id(tensor) for tensor in kept}
        for frame in frames:
            for name, value in frame.f_locals.items():
                inside = getattr(value, "__dict__", {}).values()
                if any(id(v) in result or _is_frozen_holder(v, held) for v in (value, *inside)):
                    return line_that_fills(frame, name)
        # Without a container, it is a sum over the steps.
        tensor = self._torch.Tensor
        sums = [
            (nodes_of([value]), name, frame)
            for frame in frames
            for name, value in frame.f_locals.items()
            if type(value) is tensor and value.grad_fn is not None
        ]
        most = max(sums, key=lambda value: value[0], default=None)
        return line_that_fills(most[2], most[1]) if most else None


def _holders(kept: list[Any]) -> list[Any]:
    # Each searched object makes the search longer. A step often leaves an even number of tensors:
    # an odd stride selects all kinds of them.
    asked = kept[:: len(kept) // _ASKED | 1]
    ours = (id(kept), id(asked))
    first = [
        holder
        for holder in gc.get_referrers(*asked)
        if isinstance(holder, _CONTAINERS) and id(holder) not in ours
    ]
    first = sorted(first, key=len, reverse=True)[:_ASKED]
    second = gc.get_referrers(*first) if first else []
    return [*first, *(h for h in second if isinstance(h, _CONTAINERS) and h is not first)]


def _is_frozen_holder(value: Any, held: set[int]) -> bool:
    if not (gc.get_freeze_count() and isinstance(value, _CONTAINERS)):
        return False
    return any(id(item) in held for item in gc.get_referents(value))


def nodes_of(tensors: Iterable[Any]) -> int:
    """Return the number of graph nodes that these tensors keep alive, up to a limit."""
    return len(graph_of(tensors))


def graph_of(tensors: Iterable[Any]) -> set[Any]:
    """Return the graph nodes that these tensors keep alive, up to a limit."""
    known: set[Any] = set()
    todo = [tensor.grad_fn for tensor in tensors]
    while todo and len(known) < _NODES:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        todo += [parent for parent, _ in node.next_functions]
    return known


def users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the user's code, from this one outwards."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def line_that_fills(frame: FrameType, name: str) -> Site | None:
    """Return the first line of a function that adds to this variable."""
    adds = re.compile(
        rf"\b{re.escape(name)}\b[\w.]*(\[[^]]*\])*(\.(append|extend|add|insert)\(|\s*\+=)"
        rf"|\b{re.escape(name)}\b[\w.]*\[.*\]\s*=[^=]"
        rf"|\b{re.escape(name)}\s*=.*\b{re.escape(name)}\b"
    )
    try:
        lines, first = inspect.getsourcelines(frame)  # one line for module code
    except OSError:
        return None
    first = max(first, 1)  # 0 for module code
    result = [at for at, line in enumerate(lines, first) if adds.search(line)]
    return Site(frame.f_code.co_filename, result[0]) if result else None
