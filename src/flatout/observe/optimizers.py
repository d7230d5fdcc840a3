"""Optimiser steps: they are what steps are found by."""

from __future__ import annotations

import sys
from collections import Counter
from functools import wraps
from statistics import median
from threading import get_ident
from time import perf_counter_ns
from typing import Any
from weakref import ref

from flatout.observe.lanes import HOST, OPTIMISER
from flatout.observe.observation import Optimizer, Site
from flatout.observe.sites import here, packages_above
from flatout.observe.watch import Watch

# An optimiser that steps so often before the last one of its round has a round of its own.
_LONGEST_ROUND = 20


class SeenOptimizer:
    """One optimiser, while it is watched."""

    def __init__(self, optimizer: Any, facts: Optimizer) -> None:
        self.ref = ref(optimizer)
        self.facts = facts
        self.backwards: Counter[int] = Counter()
        self.since_round = 0
        self.ends_round = True

    def tensors(self) -> list[Any]:
        """Those that it steps; none once it is gone."""
        optimizer = self.ref()
        return [] if optimizer is None else tensors_of(optimizer)

    def look_at_tables(self, tables: list[Any]) -> None:
        """Which share of the rows of these embeddings has a gradient now."""
        mine = {id(tensor) for tensor in self.tensors()}
        rows = touched = 0
        for table in tables:
            if id(table) in mine and table.grad is not None:
                rows += table.shape[0]
                touched += _touched_rows(table.grad)
        if rows:
            self.facts.sparse_share = touched / rows

    def result(self) -> Optimizer:
        """What was seen of it."""
        self.facts.steps = self.backwards.total()
        if self.facts.steps:
            self.facts.backwards = float(median(self.backwards.elements()))
        return self.facts


def _touched_rows(gradient: Any) -> int:
    if gradient.is_sparse:
        return int(gradient.coalesce().indices().shape[1])
    return int((gradient != 0).any(dim=1).sum())


class Steps:
    """Finds steps: one round of all optimisers that take turns, each after its backward passes."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: dict[int, SeenOptimizer] = {}
        self._is_counted = False
        self.backwards = 0

    def begin(self) -> None:
        """An optimiser's step begins."""
        lanes = self._watch.lanes
        lanes.switch(OPTIMISER)
        self._is_counted = False
        if lanes.steps < 2:
            for look in self._watch.with_gradients:
                look()
            lanes.last = perf_counter_ns()  # looking was no part of the step

    def end(self, optimizer: Any) -> None:
        """It has stepped. One that hands its step on to another, as wrappers do, is not counted.

        Raises:
            Enough: the script shall end here.
        """
        if self._is_counted:
            return
        self._is_counted = True
        seen = self._seen.get(id(optimizer))
        is_new = seen is None or seen.ref() is not optimizer
        if seen is None or is_new:
            seen = self._meet(optimizer)
        seen.backwards[self.backwards] += 1
        self.backwards = 0
        if seen.ends_round:
            if len(self._seen) > 1:
                for other in self._seen.values():
                    other.since_round = 0
            self._watch.close(merge=is_new and len(self._seen) > 1)
            return
        self._watch.lanes.switch(HOST)
        seen.since_round += 1
        seen.ends_round = seen.since_round > _LONGEST_ROUND

    def _meet(self, optimizer: Any) -> SeenOptimizer:
        """A new one: it comes last in its round, as far as anybody knows."""
        for other in self._seen.values():
            other.ends_round = False
        seen = SeenOptimizer(optimizer, facts_of(optimizer, here(3)))
        self._seen[id(optimizer)] = seen
        self._watch.optimizers.append(seen)
        self._watch.frameworks |= packages_above()
        for look in self._watch.on_new_optimizer:
            look()
        return seen


def facts_of(optimizer: Any, site: Site | None) -> Optimizer:
    """What is known of an optimiser of torch's or Keras' before its steps are counted."""
    facts = Optimizer(f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", site)
    options = getattr(optimizer, "defaults", {})
    facts.fused, facts.foreach = options.get("fused"), options.get("foreach")
    tensors = tensors_of(optimizer)
    facts.parameters = len(tensors)
    facts.elements = sum(tensor.numel() for tensor in tensors)
    facts.devices = sorted({str(tensor.device) for tensor in tensors})
    facts.dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return facts


def tensors_of(optimizer: Any) -> list[Any]:
    """The tensors that it steps."""
    if hasattr(optimizer, "param_groups"):
        return [tensor for group in optimizer.param_groups for tensor in group["params"]]
    variables = getattr(optimizer, "_trainable_variables", [])
    return [variable.value for variable in variables]


def watch_optimizers(module: Any, watch: Watch, steps: Steps) -> None:
    """Hooks into torch.optim.optimizer."""
    lanes, is_compiling = watch.lanes, sys.modules["torch"].compiler.is_compiling

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling() and get_ident() == lanes.thread:
            steps.begin()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling() and get_ident() == lanes.thread:
            steps.end(optimizer)

    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)
    for owner in (module.Optimizer, sys.modules["torch.nn"].Module):
        owner.zero_grad = _timed_zero_grad(owner.zero_grad, watch)


def _timed_zero_grad(original: Any, watch: Watch) -> Any:
    lanes, calls = watch.lanes, watch.calls

    @wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if get_ident() != lanes.thread:
            original(self, set_to_none)
            return
        before = lanes.switch(OPTIMISER)
        began = lanes.last
        try:
            original(self, set_to_none)
        finally:
            lanes.switch(before)
            calls.note("zero_grad", lanes.last - began, detail={"set_to_none": set_to_none})

    return zero_grad
