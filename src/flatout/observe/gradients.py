"""Gradients between steps: checks for missing zeroing, and for parameters without a gradient."""

from __future__ import annotations

import sys
from typing import Any

from flatout.hooks import before_forward, is_anything_compiled
from flatout.observe.model_facts import local
from flatout.observe.no_grad import no_grad_above
from flatout.observe.observation import Site
from flatout.observe.optimizers import SeenOptimizer
from flatout.observe.watch import Watch

# Steps after which parameters are checked for a gradient.
_LOOKS = (1, 2, 3, 5, 8, 11, 15, 20, 30, 50, 100, 200)
# Steps between which layers without a gradient are hooked, from _FROM to _UNTIL, to record calls.
_FROM, _UNTIL = 5, 8
# Maximum number of names of parameters that are recorded.
_NAMED = 20


class _Interval:
    """Interval between two steps of one optimizer."""

    def __init__(self, probe: Any) -> None:
        self.probe = probe
        self.backwards = 0
        self.is_zeroed = False


class Gradients:
    """Inspection of the gradients of all optimizers' tensors, in a few steps."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._handles: list[Any] = []
        self._renew()
        for step in _LOOKS:
            watch.at_each(step, self._look)
        watch.at_each(_FROM, self._listen)
        watch.at_each(_UNTIL, self._end_listening)
        watch.on_training.append(self._forget_intervals)
        watch.before_backward.append(self._backward_begins)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._forget_intervals()
        self._with: set[int] = set()  # ids of tensors that had a gradient in any check
        self._looks: dict[int, int] = {}  # optimizer id: checks with any gradient
        self._called: set[int] = set()  # parameters of layers called with gradients enabled
        self._off: dict[int, Site | None] = {}  # parameters called without gradients
        self._end_listening()

    def _forget_intervals(self) -> None:
        self._intervals: dict[int, _Interval] = {}

    def _backward_begins(self, tensors: Any) -> None:
        for interval in self._intervals.values():
            interval.backwards += 1
            gradient = interval.probe.grad
            interval.is_zeroed |= gradient is None or not bool(local(gradient).any())

    def _look(self) -> None:
        is_in_a_row = self._watch.lanes.steps - self._watch.began <= 4
        for optimizer in self._watch.stepping():
            mine = [tensor for tensor in optimizer.tensors() if tensor.requires_grad]
            having = [tensor for tensor in mine if tensor.grad is not None]
            interval = self._intervals.pop(id(optimizer), None)
            if interval is not None and interval.backwards and is_in_a_row:
                kept, of = optimizer.facts.kept_gradients or (0, 0)
                optimizer.facts.kept_gradients = kept + (not interval.is_zeroed), of + 1
            if not having:
                continue
            self._looks[id(optimizer)] = self._looks.get(id(optimizer), 0) + 1
            self._with |= {id(tensor) for tensor in having}
            if is_in_a_row:
                probe = self._probe(having)
                if probe is not None:
                    self._intervals[id(optimizer)] = _Interval(probe)
        if not is_in_a_row:
            self._intervals.clear()
            self._describe()

    def _probe(self, having: list[Any]) -> Any:
        dense = [item for item in having if not item.grad.is_sparse]
        for tensor in sorted(dense, key=lambda value: int(value.numel()))[:8]:
            if bool(local(tensor.grad).any()):
                return tensor
        return None

    def _without(self, optimizer: SeenOptimizer) -> list[Any]:
        return [
            tensor
            for tensor in optimizer.tensors()
            if tensor.requires_grad and id(tensor) not in self._with
        ]

    def _listen(self) -> None:
        without = {
            id(item) for optimizer in self._watch.stepping() for item in self._without(optimizer)
        }
        if not without or is_anything_compiled():
            return
        for module in self._modules():
            for inner in module.modules():
                own = {
                    id(parameter)
                    for parameter in inner._parameters.values()
                    if parameter is not None
                }
                if own & without and not isinstance(inner, self._torch.jit.ScriptModule):
                    self._handles.append(before_forward(inner, self._is_called))

    def _is_called(self, module: Any, args: Any) -> None:
        own = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
        if not module.training:
            return
        if self._torch.is_grad_enabled():
            self._called |= own
        elif own - self._off.keys():
            self._off |= dict.fromkeys(own, no_grad_above(sys._getframe(1)))

    def _end_listening(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _modules(self) -> list[Any]:
        result = [model.ref() for model in self._watch.models if model.has_parameters]
        return [module for module in result if module is not None]

    def _describe(self) -> None:
        names = {
            id(tensor): name
            for module in self._modules()
            for name, tensor in module.named_parameters()
        }
        for optimizer in self._watch.stepping():
            facts = optimizer.facts
            facts.gradient_looks = self._looks.get(id(optimizer), 0)
            without = self._without(optimizer)
            facts.unreached = [_named(item, names) for item in without if id(item) in names][
                :_NAMED
            ]
            facts.orphans = [_named(item, names) for item in without if id(item) not in names][
                :_NAMED
            ]
            facts.cut = self._cut({id(item) for item in without})
            off = [item for item in without if self._off.get(id(item)) and id(item) in names]
            off = [item for item in off if id(item) not in self._called]
            facts.without_grad = [_named(item, names) for item in off][:_NAMED]
            facts.no_grad_site = self._off[id(off[0])] if off else None

    def _cut(self, without: set[int]) -> list[str]:
        for module in self._modules():
            trained = [(n, id(t)) for n, t in module.named_parameters() if t.requires_grad]
            first = 0
            while first < len(trained) and trained[first][1] in without:
                first += 1
            rest = [tensor for _, tensor in trained[first:]]
            if not first or not rest or any(tensor not in self._with for tensor in rest):
                continue
            if all(tensor in self._called for _, tensor in trained[:first]):
                return [name for name, _ in trained[:first]][:_NAMED]
        return []


def _named(tensor: Any, names: dict[int, str]) -> str:
    shape = list(tensor.shape)
    return f"{names[id(tensor)]} {shape}" if id(tensor) in names else str(shape)
