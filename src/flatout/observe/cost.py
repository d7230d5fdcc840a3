"""What observing adds to a step, counted directly.

The hooks themselves are timed, on a Watch of their own and around functions that do nothing, and
multiplied by how often each of them ran. Between two calls lies some training work: in a step a
hook finds the processor's caches full of other things, and takes several times as long as in a
tight loop. To that comes what the looks at some steps, and the writing thread, have taken. A
comparison of runs with and without could not resolve it.

What is done once, in the first steps, is not counted: it is no part of each step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from statistics import median
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

from flatout.observe.backward import watch_backward
from flatout.observe.lanes import HOST
from flatout.observe.loaders import SeenLoader, watch_batches
from flatout.observe.models import Models
from flatout.observe.observation import Loader, Site
from flatout.observe.optimizers import SeenOptimizer, Steps
from flatout.observe.tensors import copying, timed
from flatout.observe.watch import Watch
from flatout.observe.within_loader import probed

_SERIES, _ROUNDS = 6, 40


def added_us_per_step(watch: Watch, writer_seconds: float) -> float:
    """Microseconds that each step of this Watch was longer by, to be called in a quiet moment.

    Args:
        watch: what the hooks have filled in.
        writer_seconds: of a CPU, that writing has taken.
    """
    steps = max(1, watch.lanes.steps)
    rounds = [seen.backwards for seen in watch.optimizers]
    ran = {
        _batch_ns: sum(loader.batches for loader in watch.loaders),
        _fetch_ns: sum(loader.batches for loader in watch.loaders if not loader.facts.num_workers),
        _backward_ns: sum(each * often for counts in rounds for each, often in counts.items()),
        _step_ns: sum(often for counts in rounds for often in counts.values()),
        _forward_ns: sum(model.calls for model in watch.models),
        _inner_ns: sum(model.calls * model.inner for model in watch.models),
        _call_ns: watch.calls.noted,
        _search_ns: watch.calls.sought,
        _copy_ns: watch.calls.passed,
    }
    torch = sys.modules["torch"]
    # The script may stand anywhere, as in an evaluation without gradients.
    with torch.inference_mode(False), torch.enable_grad():
        ns = sum(count * _once(cost) for cost, count in ran.items() if count)
    return float((ns + watch.looking_ns + writer_seconds * 1e9) / 1e3 / steps)


@cache
def _once(cost: Callable[[], float]) -> float:
    """A hook takes what it takes: a notebook asks for it again and again."""
    return cost()


def _extra_ns(hooked: Callable[[], Any], plain: Callable[[], Any]) -> float:
    """How much longer one call takes than another."""
    return max(0.0, _time_ns(hooked) - _time_ns(plain))


def _time_ns(call: Callable[[], Any], first: Callable[[], Any] | None = None) -> float:
    """What a call takes after some training work, in the median; `first` runs before that.

    Other jobs on the machine can only add to that: the least of several medians counts.
    """
    work = _work()
    medians = []
    for _ in range(_SERIES):
        rounds = []
        for _ in range(_ROUNDS):
            if first is not None:
                first()
            work()
            began = perf_counter_ns()
            call()
            rounds.append(perf_counter_ns() - began)
        medians.append(median(rounds))
    return min(medians)


def _work() -> Callable[[], Any]:
    """A small training step that no hook sees."""
    torch = sys.modules["torch"]
    weight = torch.ones(64, 64, requires_grad=True)
    rows = torch.ones(64, 64)
    relu, grad = torch.nn.functional.relu, torch.autograd.grad
    return lambda: grad(relu(rows @ weight).mean(), weight)


def _batch_ns() -> float:
    class Batches:
        def __init__(self, loader: Any) -> None:
            self.batch = loader

        def __next__(self) -> Any:
            self._next_index()
            return self.batch

        def _next_index(self) -> None:
            return None

    plain = Batches(())
    seen: Any = SeenLoader.__new__(SeenLoader)
    seen.count()
    seen.ref, seen.facts = lambda: None, Loader("")
    watched = type("Watched", (Batches,), dict(vars(Batches)))
    watch_batches(watched, Watch(), lambda loader, site: seen)
    hooked = watched(())
    return _extra_ns(lambda: next(hooked), lambda: next(plain))


def _fetch_ns() -> float:
    hooked = probed(_nothing, lambda fetcher: None)
    return _extra_ns(lambda: hooked(None, 0), lambda: _nothing(None, 0))


def _backward_ns() -> float:
    watch = Watch()
    autograd = SimpleNamespace(backward=_nothing)
    compiler = sys.modules["torch"].compiler
    steps = Steps(watch)
    steps.backward_site = Site("<stdin>", 1)  # the user's line is looked for once
    watch_backward(SimpleNamespace(autograd=autograd, compiler=compiler), watch, steps)
    # As Tensor.backward calls it.
    return _extra_ns(
        lambda: autograd.backward(None, None, None, False, inputs=None),
        lambda: _nothing(None, None, None, False, inputs=None),
    )


def _step_ns() -> float:
    watch = Watch()
    watch.lanes.steps, watch.lanes.due = 2, sys.maxsize
    hooks: list[Callable[..., None]] = []
    module = SimpleNamespace(
        register_optimizer_step_pre_hook=hooks.append,
        register_optimizer_step_post_hook=hooks.append,
    )
    Steps(watch).hook_into(sys.modules["torch"], module)
    optimizer: Any = SeenOptimizer.__new__(SeenOptimizer)

    def begin() -> None:
        hooks[0](optimizer, (), {})

    def end() -> None:
        hooks[1](optimizer, (), {})

    nothing = _time_ns(lambda: None)
    return max(0.0, _time_ns(begin) + _time_ns(end, first=begin) - 2 * nothing)


def _forward_ns() -> float:
    return _of_module(is_inside=False)


def _inner_ns() -> float:
    return _of_module(is_inside=True)


def _of_module(*, is_inside: bool) -> float:
    torch = sys.modules["torch"]
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    watch = Watch()
    watch.lanes.steps = 1
    models = Models(torch, watch)
    hooked = models.watched(_nothing)
    hooked(module, module.weight)
    watch.models[0].due = sys.maxsize  # looking at inputs is rare

    def first() -> None:
        watch.lanes.current = HOST
        watch.lanes.is_inside = is_inside

    return max(
        0.0,
        _time_ns(lambda: hooked(module, module.weight), first)
        - _time_ns(lambda: _nothing(module, module.weight)),
    )


def _call_ns() -> float:
    return _of_call("<stdin>")


def _search_ns() -> float:
    # A line that is none of the user's is looked up each time.
    return max(0.0, _of_call(__file__) - _of_call("<stdin>"))


def _of_call(file: str) -> float:
    names: dict[str, Any] = {}
    exec(compile("def call(method): return method(0)", file, "exec"), names)
    watch = Watch()
    watch.calls.steady_after = sys.maxsize
    call, hooked = names["call"], timed(_nothing, "item", "item", watch)
    return _extra_ns(lambda: call(hooked), lambda: call(_nothing))


def _copy_ns() -> float:
    tensor = sys.modules["torch"].ones(1)
    hooked = copying(_first, Watch())
    return _extra_ns(lambda: hooked(tensor, "cpu"), lambda: _first(tensor, "cpu"))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _first(*args: Any) -> Any:
    return args[0]
