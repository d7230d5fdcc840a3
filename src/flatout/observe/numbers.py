"""Checks of models' numbers for NaN, infinity and subnormal numbers, made at intervals.

Subnormal numbers are slow to compute with. The optimizers' moments are checked for them too: if the
gradient of a weight becomes zero, its moment shrinks by a tenth with each step. The moment ends at
the smallest numbers that exist, and stays there.

Reading all numbers of a model takes time, so the next check waits until that is a small share of
the time. All numbers are read before a save if saves are rare. They are read before an evaluation
too, since evaluating a broken model is what the check is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter_ns
from typing import Any

from flatout.observe.model_facts import local, not_finite, some_of
from flatout.observe.watch import Watch

# Largest shares of time that checks may take. _SHARE: share of all time; _SHARE_EVALUATING: share
# of the time between evaluations; _SHARE_SAVING: share of the time between saves.
_SHARE, _SHARE_EVALUATING, _SHARE_SAVING = 0.0005, 0.001, 0.001
# Step after which all numbers are read for the first time.
_FIRST_LOOK = 3
# Number of first saves before which all numbers are always read.
_SAVES = 3
# Maximum number of names of tensors that are recorded.
_NAMED = 20
# Maximum number of values of each tensor that are checked for being subnormal.
_SAMPLE = 2**16
# Minimum number of values of a tensor that is checked for subnormal numbers.
_LEAST_NUMBERS = 256


class Numbers:
    """Checker of the numbers of the trained models."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._began = self._due = self._due_saving = self._took = self._saves = 0
        watch.at(1, self._begin)
        watch.at(_FIRST_LOOK, self._look_and_plan)
        watch.before_saving.append(self._before_saving)

    def before_evaluation(self) -> None:
        """Check the numbers before a possible evaluation, unless the last check was recent."""
        if self._watch.lanes.steps and perf_counter_ns() >= self._due:
            self._watch.aside(self.look)

    def _before_saving(self) -> None:
        self._saves += 1
        if self._saves > _SAVES and perf_counter_ns() < self._due_saving:
            return
        self.look()
        self._due_saving = perf_counter_ns() + int(self._took / _SHARE_SAVING)

    def _begin(self) -> None:
        self._began = perf_counter_ns()

    def _look_and_plan(self) -> None:
        steps = self._watch.lanes.steps
        step_ns = (perf_counter_ns() - self._began) / (steps - 1)
        self.look()
        self._watch.at(steps + 1 + int(self._took / _SHARE / step_ns), self._look_and_plan)

    def look(self) -> None:
        """Read all numbers of the models."""
        began = perf_counter_ns()
        is_flushed = flushes_subnormals(self._torch)
        for model in self._watch.models:
            module = model.ref()
            if module is None or not model.is_stepped:
                continue
            result = {*model.facts.not_finite, *not_finite(module)}
            model.facts.not_finite = sorted(result)[:_NAMED]
            share = 0.0 if is_flushed else subnormal_share(_tensors_of(module))
            model.facts.subnormal_share = max(model.facts.subnormal_share or 0.0, share)
        for optimizer in self._watch.optimizers:
            states = getattr(optimizer.ref(), "state", None)
            if not isinstance(states, Mapping):  # no optimizer of torch, or the optimizer was freed
                continue
            share = 0.0 if is_flushed else subnormal_share(_moments_in(states))
            optimizer.facts.subnormal_share = max(optimizer.facts.subnormal_share or 0.0, share)
        now = perf_counter_ns()
        self._took = now - began
        self._due = now + int(self._took / _SHARE_EVALUATING)


def flushes_subnormals(torch: Any) -> bool:
    """Return whether this thread computes zero where a result is subnormal."""
    smallest = torch.full((1,), torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
    return float((smallest * 0.5).item()) == 0.0


def subnormal_share(tensors: Iterable[Any]) -> float:
    """Return the largest share of subnormal numbers in one of the tensors on a CPU.

    Small tensors are left out, since they take no measurable time.
    """
    return max(map(_share, tensors), default=0.0)


def _tensors_of(module: Any) -> Iterator[Any]:
    for owner in [*module.parameters(), *module.buffers()]:
        tensor = local(owner)
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _moments_in(states: Mapping[Any, Any]) -> Iterator[Any]:
    import torch

    for state in states.values():
        kept = state.values() if isinstance(state, Mapping) else ()
        yield from (local(item) for item in kept if torch.is_tensor(item))


def _share(numbers: Any) -> float:
    import torch

    if numbers.device.type != "cpu" or numbers.dtype != torch.float32:
        return 0.0
    if numbers.numel() < _LEAST_NUMBERS or numbers.layout != torch.strided:
        return 0.0
    # Compared as bits: where the CPU flushes subnormals, they compare as zeros.
    bits = some_of(numbers.detach(), _SAMPLE).view(torch.int32) & 0x7FFFFFFF
    is_subnormal = (bits > 0) & (bits < 0x00800000)
    return int(is_subnormal.sum()) / int(bits.numel())
