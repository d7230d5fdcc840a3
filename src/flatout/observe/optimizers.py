"""Optimizer steps, which define the steps of the script."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any
from weakref import ref

from flatout.hooks import Hook, is_anything_compiled, unnumbered, wrap
from flatout.observe.lanes import HOST, OPTIMIZER
from flatout.observe.model_facts import local
from flatout.observe.observation import Optimizer, Site
from flatout.observe.sites import here, packages_above, users_frame
from flatout.observe.watch import Watch

if TYPE_CHECKING:
    from flatout.kernels import StepHook

# Maximum number of steps of an optimizer within one round of all optimizers. An optimizer that
# steps more often, before the last optimizer has stepped, has a round of its own.
_LONGEST_ROUND = 20
_ELSEWHERE = "an optimizer stepped in a thread beside the main one: those steps were not watched"
# Numbers of an optimizer's steps after which its learning rate is recorded.
_RATE_STEPS = (1, 5, 20, 100)
# Maximum number of successive optimizers of the same parameters that are recorded separately: some
# scripts make an optimizer in each step.
_FOLLOWING = 4
# Number of first steps in which zero_grad is timed.
_NOTED_STEPS = 50
_OPTIONS = ("lr", "momentum", "weight_decay", "beta1", "beta2")
_OPTIONS_OF_KERAS = {
    "momentum": "momentum",
    "weight_decay": "weight_decay",
    "beta1": "beta_1",
    "beta2": "beta_2",
}


class SeenOptimizer:
    """An observed optimizer."""

    def __init__(self, optimizer: Any, facts: Optimizer) -> None:
        self.ref = ref(optimizer)
        self.facts = facts
        self.counts: dict[int, int] = {}  # number of steps, by backward passes before the step
        self.count: Callable[[], None] = lambda: None  # updates `counts`
        self.ns = 0  # time of its steps, where several optimizers step
        self.since_round = 0
        self.ends_round = True
        self.followed = 0  # number of earlier optimizers of the same parameters
        first = next(iter(tensors_of(optimizer)), None)
        self._first: Callable[[], Any] = (lambda: None) if first is None else ref(first)

    def has_same(self, optimizer: Any) -> bool:
        """Return whether the other optimizer has the same class and the same first parameter."""
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        first = next(iter(tensors_of(optimizer)), None)
        return first is not None and self.facts.kind == name and self._first() is first

    @property
    def backwards(self) -> dict[int, int]:
        """Number of steps, by the number of backward passes before the step."""
        self.count()
        return self.counts

    @property
    def steps(self) -> int:
        """Number of steps of the optimizer."""
        return sum(self.backwards.values())

    def tensors(self) -> list[Any]:
        """Return the tensors that the optimizer steps; none once the optimizer is freed."""
        optimizer = self.ref()
        return [] if optimizer is None else tensors_of(optimizer)

    def look_at_tables(self, tables: list[Any]) -> None:
        """Record the share of the updated rows of these embedding tables that have a gradient."""
        mine = {id(tensor) for tensor in self.tensors()}
        rows = touched = 0
        for table in tables:
            if id(table) in mine and table.grad is not None:
                stepped, having = _rows(table.grad)
                rows += stepped
                touched += having
        if rows:
            self.facts.sparse_share = touched / rows

    def look_at_rate(self) -> None:
        """Record the learning rate of the step that has just ended."""
        optimizer = self.ref()
        groups = getattr(optimizer, "param_groups", None)
        if hasattr(optimizer, "_learning_rate"):
            self.facts.options = _options_of_keras(optimizer)
        if groups:
            step = sum(self.backwards.values())
            self.facts.rates.append((step, float(groups[0]["lr"])))
            self.facts.options = _options(groups)
            target = groups[0].get("initial_lr")
            self.facts.first_target = None if target is None else float(target)

    def result(self) -> Optimizer:
        """Return the facts about the optimizer."""
        counts = Counter(self.backwards)
        self.facts.steps = counts.total()
        if self.facts.steps:
            self.facts.backwards = float(median(counts.elements()))
        return self.facts


def _options(groups: list[dict[str, Any]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for group in groups:
        betas = group.get("betas", ())
        named = {**group, **{f"beta{at}": beta for at, beta in enumerate(betas, 1)}}
        for name in _OPTIONS:
            if isinstance(value := named.get(name), float | int):
                result[name] = max(result.get(name, 0.0), float(value), key=abs)
    return result


def _options_of_keras(optimizer: Any) -> dict[str, float]:
    rate = optimizer._learning_rate
    if type(rate).__module__.startswith("keras."):  # a variable, or a Keras schedule
        result = {"lr": float(getattr(optimizer.learning_rate, "value", optimizer.learning_rate))}
    else:
        result = {}  # a function of the script, which only the script may call
    for name, own in _OPTIONS_OF_KERAS.items():
        if isinstance(value := getattr(optimizer, own, None), float | int):
            result[name] = float(value)
    return result


def _rows(gradient: Any) -> tuple[int, int]:
    if gradient.is_sparse:  # a step updates only the rows in the gradient
        having = int(gradient.coalesce().indices().shape[1])
        return having, having
    return int(gradient.shape[0]), int((gradient != 0).any(dim=1).sum())


class StepFinder:
    """Finder of the script's steps.

    A step is one round of all optimizers that step one after another, each after its backward
    passes.

    Attributes:
        backward_site: the user's line of the first backward pass.
        known_ns: nanoseconds of the optimizers' lane that are attributed to an optimizer.
    """

    __slots__ = (
        "_counted",
        "_is_traced",
        "_lanes",
        "_quick",
        "_seen",
        "_sole",
        "_watch",
        "backward_site",
        "known_ns",
    )

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lanes = watch.lanes
        self._seen: dict[int, SeenOptimizer] = {}
        self._sole: SeenOptimizer | None = None  # set where it is the only optimizer
        self._counted = 0  # backward passes of this round before the latest optimizer step
        self._is_traced: Callable[[], bool] = lambda: False
        self._quick: StepHook | None = None
        self.backward_site: Site | None = None
        self.known_ns = 0
        watch.on_renewal.append(self.renew)

    def renew(self) -> None:
        """Reset all counts, and forget the known optimizers."""
        self._seen.clear()
        self._let_alone(None)
        self._counted = self.known_ns = 0
        self.backward_site = None

    def hook_into(self, torch: Any, module: Any) -> None:
        """Hook into torch.optim.optimizer."""
        self._is_traced = torch.compiler.is_dynamo_compiling
        begin, end = self.begin, self.end
        handles = (
            unnumbered(module.register_optimizer_step_pre_hook(begin)),
            unnumbered(module.register_optimizer_step_post_hook(end)),
        )
        self._quick = self._watch.quick.stand_for_steps(handles, begin, end, self._watch.attend)

    def begin(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Begin an optimizer step; the arguments are those of torch's hooks."""
        lanes = self._lanes
        if self._is_traced() or lanes.enter(OPTIMIZER) < 0:
            return
        lanes.is_counted = False
        watch = self._watch
        # Only the first step of a later training reveals that training, so one more step is
        # inspected.
        if lanes.steps < watch.began + (3 if watch.began else 2):
            watch.aside(*watch.with_gradients, is_once=True)

    def end(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """End an optimizer step; ignore the step of a wrapper around another optimizer.

        Raises:
            Enough: the script is to end here.
        """
        lanes = self._lanes
        if self._is_traced() or lanes.is_counted:
            return
        known_optimizer, backwards = self._sole, lanes.backwards
        if known_optimizer is not None and known_optimizer.ref() is optimizer:
            is_due = lanes.leave_step()
            if is_due < 0:
                self._note_elsewhere()
                return
            known_optimizer.counts[backwards] = known_optimizer.counts.get(backwards, 0) + 1
            if lanes.is_open:
                lanes.settle()
        elif lanes.enter(HOST) < 0:
            self._note_elsewhere()
            return
        else:
            is_due = self._end_of_several(optimizer)
        lanes.is_counted = True
        if is_due:
            self._watch.attend()

    def _let_alone(self, optimizer: SeenOptimizer | None) -> None:
        self._sole = optimizer
        if self._quick is not None:
            if optimizer is None:
                self._quick.watch(None, {})
            else:
                self._quick.watch(optimizer.ref, optimizer.counts)
                optimizer.count = self._quick.count

    def _note_elsewhere(self) -> None:
        if self._lanes.thread:
            self._watch.notes[_ELSEWHERE] = None

    def _end_of_several(self, optimizer: Any) -> bool:
        lanes, known_optimizer = self._lanes, self._seen.get(id(optimizer))
        is_new = known_optimizer is None or known_optimizer.ref() is not optimizer
        # The first step of each optimizer sets things up, so its time is not counted.
        is_first_round = self._sole is None or sum(self._sole.backwards.values()) < 2
        before = None if is_first_round else self._sole  # the only optimizer until now
        self._took(before if is_new else known_optimizer)
        if known_optimizer is None or is_new:
            known_optimizer = self._meet(optimizer)
        own = lanes.backwards - self._counted
        known_optimizer.counts[own] = known_optimizer.counts.get(own, 0) + 1
        self._counted = lanes.backwards
        if not known_optimizer.ends_round:
            known_optimizer.since_round += 1
            known_optimizer.ends_round = known_optimizer.since_round > _LONGEST_ROUND
            return False
        several = len(self._seen) > 1
        self._let_alone(None if several else known_optimizer)
        self._counted = 0
        for other in self._seen.values():
            other.since_round = 0
        is_due = lanes.lap(several and is_new)
        if lanes.is_open:
            lanes.settle()
        return is_due

    def _took(self, stepped: SeenOptimizer | None) -> None:
        ns = self._lanes.spent[OPTIMIZER] - self.known_ns
        self.known_ns += ns
        if stepped is not None:
            stepped.ns += ns

    def _meet(self, optimizer: Any) -> SeenOptimizer:
        before = self._gone_before(optimizer)
        for other in self._seen.values():
            other.ends_round = False
        if before is not None and before.followed >= _FOLLOWING:
            before.ref, before.ends_round = ref(optimizer), True
            self._seen[id(optimizer)] = before
            return before
        known_optimizer = SeenOptimizer(optimizer, facts_of(optimizer, here(4)))
        known_optimizer.followed = 0 if before is None else before.followed + 1
        loop = users_frame(sys._getframe(4))
        if loop is not None:
            self._watch.calls.loops.add(loop.f_code)
        known_optimizer.facts.backward_site = self.backward_site
        self._seen[id(optimizer)] = known_optimizer
        self._watch.aside(self._watch.training_begins, is_once=True)
        self._watch.optimizers.append(known_optimizer)
        self._watch.frameworks |= packages_above()
        for step in _RATE_STEPS:
            later = self._lanes.steps + step
            self._watch.at(later, known_optimizer.look_at_rate, is_once=True)
        for look in self._watch.on_new_optimizer:
            look()
        return known_optimizer

    def _gone_before(self, optimizer: Any) -> SeenOptimizer | None:
        gone = [number for number, item in self._seen.items() if item.ref() is None]
        items = [self._seen.pop(number) for number in gone]
        return next((item for item in items if item.has_same(optimizer)), None)


def results_of(optimizers: list[SeenOptimizer]) -> list[Optimizer]:
    """Return the facts about each optimizer, with its share of the time of all their steps."""
    whole = sum(optimizer.ns for optimizer in optimizers)
    for optimizer in optimizers:
        optimizer.facts.step_share = optimizer.ns / whole if whole > 0 else 1 / len(optimizers)
    return [optimizer.result() for optimizer in optimizers]


def facts_of(optimizer: Any, site: Site | None) -> Optimizer:
    """Return the facts about a torch or Keras optimizer that are known before it steps."""
    facts = Optimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", site)
    options = getattr(optimizer, "defaults", {})
    facts.fused, facts.foreach = options.get("fused"), options.get("foreach")
    tensors = tensors_of(optimizer)
    facts.parameters = len(tensors)
    facts.elements = sum(tensor.numel() for tensor in tensors)
    facts.local_bytes = sum(local(tensor).nbytes for tensor in tensors)
    facts.devices = sorted({str(tensor.device) for tensor in tensors})
    facts.dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return facts


def tensors_of(optimizer: Any) -> list[Any]:
    """Return the tensors that an optimizer steps."""
    if hasattr(optimizer, "param_groups"):
        return [tensor for group in optimizer.param_groups for tensor in group["params"]]
    variables = getattr(optimizer, "_trainable_variables", [])
    return [variable.value for variable in variables]


def watch_optimizers(torch: Any, watch: Watch, steps: StepFinder) -> None:
    """Hook into the steps of torch's optimizers, and into zero_grad."""
    steps.hook_into(torch, sys.modules["torch.optim.optimizer"])
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        _watch_zero_grad(owner, watch, steps)


def _watch_zero_grad(owner: Any, watch: Watch, steps: StepFinder) -> None:
    lanes = watch.lanes
    taken: Counter[int] = Counter()
    hook: Hook | None = None

    def begin() -> None:
        nonlocal hook
        taken.clear()
        if hook is None:
            hook = wrap(owner, "zero_grad", "observe", _timed_zero_grad, watch, steps, taken)

    def end() -> None:
        nonlocal hook
        watch.calls.spread("zero_grad", _NOTED_STEPS)
        if is_anything_compiled():
            return  # removing the hook would make torch.compile compile again
        if hook is not None and hook.remove():
            hook = None
            for lane, ns in taken.items():
                lanes.takes_each_step(ns / lanes.steps, lane, OPTIMIZER)

    begin()
    watch.at(_NOTED_STEPS, end)
    watch.on_renewal.append(begin)


def _timed_zero_grad(original: Any, watch: Watch, steps: StepFinder, taken: Counter[int]) -> Any:
    lanes, calls = watch.lanes, watch.calls
    is_traced = sys.modules["torch"].compiler.is_dynamo_compiling
    details = {False: {"set_to_none": False}, True: {"set_to_none": True}}

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if is_traced() or (before := lanes.enter(OPTIMIZER)) < 0:
            original(self, set_to_none)
            return
        began = lanes.last
        try:
            original(self, set_to_none)
        finally:
            lanes.switch(before)
            took = lanes.last - began
            taken[before] += took
            steps.known_ns += took
            if lanes.steps < _NOTED_STEPS:
                calls.note("zero_grad", took, 2, details[bool(set_to_none)])

    return zero_grad
