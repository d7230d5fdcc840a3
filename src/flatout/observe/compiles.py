"""Number of graphs that torch.compile has made, read from its own counters in a few steps."""

from __future__ import annotations

import sys
from typing import Any

from flatout.hooks import is_anything_compiled
from flatout.observe.watch import Watch

# Steps in which Dynamo's counters are read; they are also read at the end.
_LOOKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_WHOLE = "_compile.compile_inner"


class Compiles:
    """Values of Dynamo's counters, if something is compiled."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._looked: list[tuple[int, int, float]] = []
        watch.on_renewal.append(self._looked.clear)
        for step in _LOOKS:
            watch.at(step, self._look)

    def _look(self) -> None:
        self._looked += self._now()

    def so_far(self) -> list[tuple[int, int, float]]:
        """Return [step, graphs, seconds spent on compiling them] of each read, and of now."""
        return [*self._looked, *self._now()]

    def _now(self) -> list[tuple[int, int, float]]:
        if not is_anything_compiled() or self._watch.lanes.steps < _LOOKS[0]:
            return []
        dynamo: Any = sys.modules["torch._dynamo.utils"]
        # Copied to a dict, since reading a missing key of a defaultdict would add it.
        graphs = dict(dynamo.counters).get("stats", {}).get("unique_graphs", 0)
        times = dict(getattr(dynamo, "compilation_time_metrics", {})).get(_WHOLE, ())
        return [(self._watch.lanes.steps, int(graphs), float(sum(times)))]
