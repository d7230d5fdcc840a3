"""What observing adds to a step, counted directly.

The hooks themselves are timed, on a Watch of their own and around functions that do nothing, and
multiplied by how often each of them ran. To that comes what the writing thread has taken. A
comparison of runs with and without could not resolve it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

from flatout.observe.backward import watch_backward
from flatout.observe.loaders import SeenLoader, watch_batches
from flatout.observe.models import Models
from flatout.observe.optimizers import SeenOptimizer, Steps
from flatout.observe.tensors import timed
from flatout.observe.watch import Watch

_ROUNDS, _CALLS = 5, 200


def added_us_per_step(watch: Watch, writer_seconds: float) -> float:
    """Microseconds that each step of this Watch was longer by, to be called in a quiet moment."""
    steps = max(1, watch.lanes.steps)
    ns = (
        sum(loader.batches for loader in watch.loaders) * _batch_ns()
        + sum(seen.backwards.total() * seen.result().backwards for seen in watch.optimizers)
        * _backward_ns()
        + sum(seen.backwards.total() for seen in watch.optimizers) * _step_ns()
        + watch.lanes.forwards * _forward_ns()
        + watch.calls.noted * _call_ns()
    )
    return float((ns / 1e3 + writer_seconds * 1e6) / steps)


def _extra_ns(hooked: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """How much longer one call takes than another, in the median of rounds."""
    return max(0.0, _time_ns(hooked) - _time_ns(plain))


def _time_ns(call: Callable[[], Any]) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        began = perf_counter_ns()
        for _ in range(_CALLS):
            call()
        rounds.append((perf_counter_ns() - began) / _CALLS)
    return median(rounds)


def _batch_ns() -> float:
    class Batches:
        def __init__(self, loader: Any) -> None:
            self.batch = loader

        def __next__(self) -> Any:
            return self.batch

        def _next_index(self) -> None:
            return None

    plain = Batches(())
    seen: Any = SeenLoader.__new__(SeenLoader)
    seen.count()
    watched = type("Watched", (Batches,), dict(vars(Batches)))
    watch_batches(watched, Watch(), lambda loader, site: seen)
    hooked = watched(())
    return _extra_ns(lambda: next(hooked), lambda: next(plain))


def _backward_ns() -> float:
    watch = Watch()
    autograd = SimpleNamespace(backward=_nothing)
    compiler = sys.modules["torch"].compiler
    watch_backward(SimpleNamespace(autograd=autograd, compiler=compiler), watch, Steps(watch))
    return _extra_ns(lambda: autograd.backward(None), lambda: _nothing(None))


def _step_ns() -> float:
    watch = Watch()
    steps = Steps(watch)
    optimizer = SeenOptimizer.__new__(SeenOptimizer)
    steps.end(optimizer)

    def step() -> None:
        steps.begin()
        steps.end(optimizer)

    return _time_ns(step)


def _forward_ns() -> float:
    torch = sys.modules["torch"]
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    watch = Watch()
    hooked = Models(torch, watch).watched(_nothing)
    hooked(module, module.weight)
    return _extra_ns(lambda: hooked(module, module.weight), lambda: _nothing(module, module.weight))


def _call_ns() -> float:
    hooked = timed(_nothing, "item", "item", Watch())
    return _extra_ns(lambda: hooked(0), lambda: _nothing(0))


def _nothing(*args: Any) -> None:
    return None
