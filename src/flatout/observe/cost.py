"""Overhead of the observation per step, measured directly.

The hooks are timed on a Watch of their own, around functions that do nothing, and multiplied by the
number of their calls. A small training step runs between two calls. It fills the caches of the
processor, so that a hook takes several times as long as in a tight loop. That step is timed with
the hook, since the hook slows the step down by filling the caches in turn. The time of looks
(inspections of the script between steps), and of the threads that write and sample lines, is added.
A comparison of runs with and without observation could not resolve such a small overhead.

One-time work, in the first steps or at planned steps, is reported separately, since it is no part
of each step. Recurring looks and threads take a share of the time. That share is applied to the
median step: a few long steps, such as those with compilation, must not distort it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain
from statistics import median, quantiles
from time import perf_counter_ns, thread_time_ns
from types import SimpleNamespace
from typing import Any, NamedTuple

from flatout.kernels import Loaded
from flatout.observe.backward import watch_backward
from flatout.observe.lanes import EVALUATION, HOST, SAVING
from flatout.observe.loaders import SeenLoader, watch_batches
from flatout.observe.models import Models
from flatout.observe.observation import Loader, Site
from flatout.observe.optimizers import SeenOptimizer, StepFinder
from flatout.observe.tensors import copying, timed
from flatout.observe.watch import Watch
from flatout.observe.within_loader import probed

# _QUADRUPLES: maximum number of A B B A quadruples that are timed; _FEWER: pairs of passed ns and
# the maximum number of quadruples after that time, since other work on the machine may slow down
# the measurement.
_QUADRUPLES = 150
_FEWER = ((300_000_000, 30), (900_000_000, 4))
# Observed ns below which the time of looks (inspections between steps) counts as one-time overhead,
# since looks are rare.
_RARE_NS = 2_000_000_000


class Added(NamedTuple):
    """Overhead of an observation.

    Attributes:
        us_per_step: microseconds per step.
        once_ms: additional milliseconds in the first steps. Where the observation was too short for
            a long-term share of looks and threads, their time is included.
    """

    us_per_step: float
    once_ms: float


Ran = Counter[tuple[Any, ...]]
"""Number of hook calls, by the function that times such a hook, and its arguments."""


def added(
    watch: Watch, aside_seconds: float, first_seconds: float = 0.0, first: Ran | None = None
) -> Added:
    """Return the overhead of the observation that this Watch holds; to be called between steps."""
    steps, ran, once_ran = max(1, watch.lanes.steps), hooks_ran(watch), Ran(first or {})
    # Calls of the kinds that were recorded in some steps only.
    once_ran[_call_ns,] = max(once_ran[_call_ns,], min(watch.calls.noted, watch.calls.noted_once))
    once_ran[_search_ns,] = max(once_ran[_search_ns,], watch.calls.sought_once)
    ran.subtract(once_ran)
    torch = sys.modules["torch"]
    # The script may be within any context, such as an evaluation without gradients.
    with torch.inference_mode(False), torch.enable_grad(), _one_thread(torch):
        ns, once = (
            sum(count * _once(*cost) for cost, count in part.items() if count > 0)
            for part in (ran, once_ran)
        )
    once += watch.once_ns + first_seconds * 1e9
    spent = watch.lanes.spent
    between = (spent[EVALUATION] + spent[SAVING]) / max(1, sum(spent))  # share between the steps
    looks = watch.looking_ns + (1 - between) * aside_seconds * 1e9
    if sum(spent) < _RARE_NS:
        return Added(ns / 1e3 / steps, (once + looks) / 1e6)
    share = looks / ((1 - between) * sum(spent))
    return Added((ns / steps + share * median(watch.lanes.step_ns())) / 1e3, once / 1e6)


def hooks_ran(watch: Watch) -> Ran:
    """Return the number of calls of each kind of hook until now."""
    quick, rounds = watch.quick, [optimizer.backwards for optimizer in watch.optimizers]
    backwards = sum(each * often for counts in rounds for each, often in counts.items())
    calls = sum(model.calls for model in watch.models)
    inner = sum(model.calls * model.inner for model in watch.models)
    # Calls of inner modules take the fast path in C whenever that path is active.
    quick_inner = inner * min(calls, quick.seen_calls) // max(1, calls)
    batches = sum(loader.batches for loader in watch.loaders)
    made = sum(loader.batches for loader in watch.loaders if not loader.facts.num_workers)
    return Ran(
        {
            (_batch_ns, False): batches - quick.batches,
            (_batch_ns, True): quick.batches,
            (_fetch_ns, False): made - quick.fetches,
            (_fetch_ns, True): quick.fetches,
            (_backward_ns, False): backwards - quick.backwards,
            (_backward_ns, True): quick.backwards,
            (_step_ns, False): sum(sum(counts.values()) for counts in rounds) - quick.steps,
            (_step_ns, True): quick.steps,
            (_module_ns, False, False): calls - quick.calls,
            (_module_ns, False, True): quick.calls,
            (_module_ns, True, False): inner - quick_inner,
            (_module_ns, True, True): quick_inner,
            (_call_ns,): watch.calls.noted,
            (_search_ns,): watch.calls.sought,
            (_copy_ns,): watch.calls.passed,
        }
    )


@contextmanager
def _one_thread(torch: Any) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch._C.set_num_threads(1)
    try:
        yield
    finally:
        torch._C.set_num_threads(threads)


@cache
def _once(cost: Callable[..., float], *kind: bool) -> float:
    return cost(*kind)


def _extra_ns(
    hooked: Callable[[], Any], plain: Callable[[], Any], first: Callable[[], Any] | None = None
) -> float:
    work = _work()

    def took(call: Callable[[], Any]) -> int:
        if first is not None:
            first()
        began = thread_time_ns()
        call()
        work()
        return thread_time_ns() - began

    with_it: list[int] = []
    without: list[int] = []
    start = perf_counter_ns()
    while len(with_it) < 2 * _wanted(perf_counter_ns() - start):
        for call, into in (
            (hooked, with_it), (plain, without), (plain, without), (hooked, with_it)
        ):  # fmt: skip
            into.append(took(call))
    return max(0.0, quantiles(with_it)[0] - quantiles(without)[0])


def _wanted(passed_ns: int) -> int:
    return min([_QUADRUPLES, *(fewer for ns, fewer in _FEWER if passed_ns > ns)])


def _work() -> Callable[[], Any]:
    torch = sys.modules["torch"]
    functional, grad = torch.nn.functional, torch.autograd.grad
    inner = torch.ones(16, 16, requires_grad=True, device="cpu")
    outer = torch.ones(4, 16, requires_grad=True, device="cpu")
    rows = torch.ones(64, 16, device="cpu")
    classes = torch.zeros(64, dtype=torch.long, device="cpu")

    def step() -> None:
        hidden = functional.relu(functional.linear(rows, inner))
        loss = functional.cross_entropy(functional.linear(hidden, outer), classes)
        gradients = grad(loss, (inner, outer))
        with torch.no_grad():
            torch._foreach_add_([inner, outer], gradients, alpha=-1e-3)

    return step


def _batch_ns(is_quick: bool) -> float:
    class Batches:
        def __init__(self, loader: Any) -> None:
            self.batch = loader

        def __next__(self) -> Any:
            self._next_index()
            return self.batch

        def _next_index(self) -> None:
            return None

    plain = Batches(())
    result: Any = SeenLoader.__new__(SeenLoader)
    result.count()
    result.ref, result.facts = lambda: None, Loader("")
    watched = type("Watched", (Batches,), dict(vars(Batches)))
    watch = Watch()
    watch.lanes.steps = 1
    watch_batches(watched, watch, lambda loader, site: result)
    hooked = watched(())
    next(hooked)  # the first batch records its sample indices
    if is_quick:
        watch.quick.begin()
        result.due = sys.maxsize
    return _extra_ns(lambda: next(hooked), lambda: next(plain))


def _fetch_ns(is_quick: bool) -> float:
    watch = Watch()
    watch.lanes.loader = Loaded()
    if is_quick:
        watch.quick.begin()
    hooked = watch.quick.fetch(_nothing, probed(_nothing, lambda fetcher: None))
    return _extra_ns(lambda: hooked(None, 0), lambda: _nothing(None, 0))


def _backward_ns(is_quick: bool) -> float:
    watch = Watch()
    plain, hooked = SimpleNamespace(backward=_backward), SimpleNamespace(backward=_backward)
    compiler = sys.modules["torch"].compiler
    steps = StepFinder(watch)
    steps.backward_site = Site("<stdin>", 1)  # the user's line is searched once
    watch_backward(SimpleNamespace(autograd=hooked, compiler=compiler), watch, steps)
    if is_quick:
        watch.quick.begin()
    # The arguments are those of Tensor.backward.
    return _extra_ns(
        lambda: hooked.backward(None, None, None, False, inputs=None),
        lambda: plain.backward(None, None, None, False, inputs=None),
    )


def _step_ns(is_quick: bool) -> float:
    watch = Watch()
    watch.lanes.steps, watch.lanes.due = 2, sys.maxsize
    hooks: dict[int, Callable[..., None]] = {}

    def register(hook: Callable[..., None]) -> Any:
        handle = SimpleNamespace(id=len(hooks), hooks_dict_ref=lambda: hooks)
        hooks[handle.id] = hook
        return handle

    module = SimpleNamespace(
        register_optimizer_step_pre_hook=register, register_optimizer_step_post_hook=register
    )
    StepFinder(watch).hook_into(sys.modules["torch"], module)
    optimizer: Any = SeenOptimizer.__new__(SeenOptimizer)
    args: tuple[()] = ()
    kwargs: dict[str, Any] = {}
    hooks[0](optimizer, args, kwargs)
    hooks[1](optimizer, args, kwargs)  # the first step registers the optimizer
    if is_quick:
        watch.quick.begin()
    none: dict[int, Callable[..., None]] = {}
    begins, ends = {0: hooks[0]}, {1: hooks[1]}

    def step(befores: dict[int, Any], afters: dict[int, Any]) -> None:
        for hook in chain(none.values(), befores.values()):
            hook(optimizer, args, kwargs)
        for hook in chain(none.values(), afters.values()):
            hook(optimizer, args, kwargs)

    return _extra_ns(lambda: step(begins, ends), lambda: step(none, none))


def _module_ns(is_inside: bool, is_quick: bool) -> float:
    torch = sys.modules["torch"]

    class Hooked(torch.nn.Module):  # type: ignore[name-defined,misc]
        __call__ = _nothing

    class Plain(torch.nn.Module):  # type: ignore[name-defined,misc]
        __call__ = _nothing

    module, plain = Hooked(), Plain()
    module.weight = torch.nn.Parameter(torch.zeros(1))
    watch = Watch()
    watch.lanes.steps = 1
    models = Models(torch, watch)
    models.watch_class(Hooked)
    module(module.weight)
    watch.models[0].due = sys.maxsize  # inputs are inspected rarely
    if is_quick:
        watch.quick.begin()

    def first() -> None:
        watch.lanes.current = HOST
        watch.lanes.is_inside = is_inside

    return _extra_ns(lambda: module(module.weight), lambda: plain(module.weight), first)


def _call_ns() -> float:
    return _of_call("<stdin>")


def _search_ns() -> float:
    # A line that is not the user's is searched in each call.
    return max(0.0, _of_call(__file__) - _of_call("<stdin>"))


def _of_call(file: str) -> float:
    names: dict[str, Any] = {}
    exec(compile("def call(method): return method(0)", file, "exec"), names)
    watch = Watch()
    watch.calls.steady_after = sys.maxsize
    call, hooked = names["call"], timed(_nothing, "item", "item", watch)
    return _extra_ns(lambda: call(hooked), lambda: call(_nothing))


def _copy_ns() -> float:
    tensor = sys.modules["torch"].ones(1, device="cpu")
    hooked = copying(_first, Watch())
    return _extra_ns(lambda: hooked(tensor, "cpu"), lambda: _first(tensor, "cpu"))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    return None


def _first(*args: Any) -> Any:
    return args[0]
