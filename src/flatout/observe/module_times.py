"""Time of forward and backward by module, measured in two of the first steps.

Autograd numbers its nodes in the order of forward, and runs them in the calling thread. A node
belongs to a module if its number lies between the numbers at the beginning and the end of the
module's call. The node's backward takes until the next node begins. Nodes that accumulate a
parameter's gradient have no number, and belong to the module with that parameter.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.hooks import after_forward, before_forward, is_anything_compiled, unnumbered
from flatout.observe.lanes import BACKWARD, FORWARD
from flatout.observe.observation import ModuleTime, Observation
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.watch import Watch

# _FROM: first measured step, since earlier steps do one-time setup; _MODULES, _NODES: maximum
# number of modules and graph nodes, since larger models take too long to measure.
_FROM, _MODULES, _NODES = 2, 2000, 20_000
# Maximum number of groups of modules that are reported.
_TOLD = 20
# Share of a module's backward time from which an operator is reported, for modules other than
# torch's.
_MOST = 0.5
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_END = re.compile(r"Backward\d*$")


def _adds_up(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _is_on_cpu(module: Any) -> bool:
    return all(tensor.device.type == "cpu" for tensor in module.parameters())


@dataclass
class _Of:
    """Time of one module without its children, in ns."""

    forward: int = 0
    backward: int = 0
    operators: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class ModuleTimes:
    """Hooks on all modules of the models trained on a CPU, and on the nodes of their graphs."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._handles: list[Any] = []
        self._renew()
        watch.at(_FROM, self._open)
        for step in range(_FROM + 1, AFTER_STEPS + 1):
            watch.at(step, self._end_step)
        watch.at(AFTER_STEPS, self._remove)
        watch.before_backward.append(self._backward_begins)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._remove()
        self._of: dict[int, _Of] = defaultdict(_Of)  # by module id; -1 is outside of modules
        self._steps: list[dict[int, _Of]] = []  # `_of` of each finished step
        self._lanes_ns: list[tuple[int, int]] = []  # forward and backward of each of these steps
        self._names: list[tuple[str, Any]] = []
        self._numbers: dict[int, int] = {}  # module ids by `id()` of modules and parameters
        # Open calls: module, start time, first node, ns of calls within it.
        self._calls: list[list[int]] = []
        self._spans: list[tuple[int, int, int]] = []  # first node, last node, module
        self._ran: list[tuple[int, str, int]] = []  # nodes of a backward pass: module, name, start
        self._since = (0, 0)

    # -- forward ----------------------------------------------------------------------------------

    def _open(self) -> None:
        roots = [model.ref() for model in self._watch.models if model.is_stepped]
        followed = [item for item in roots if item is not None and _is_on_cpu(item)]
        if is_anything_compiled() or sum(len(list(root.modules())) for root in followed) > _MODULES:
            return
        for root in followed:
            self._follow(root)
        spent = self._watch.lanes.spent
        self._since = spent[FORWARD], spent[BACKWARD]

    def _follow(self, root: Any) -> None:
        parameters = self._torch.nn.ParameterDict, self._torch.nn.ParameterList
        by_name: dict[str, int] = {}
        for name, module in root.named_modules():
            if id(module) in self._numbers or isinstance(module, self._torch.jit.ScriptModule):
                continue  # part of two models, or scripted
            above = by_name.get(name.rpartition(".")[0])
            if above is not None and isinstance(module, parameters):
                number = above  # parameter containers are never called, as in a Keras layer
            else:
                number = by_name[name] = self._numbers[id(module)] = len(self._names)
                self._names.append((name, type(module)))
            for tensor in module._parameters.values():
                if tensor is not None:
                    self._numbers.setdefault(id(tensor), number)
            begins = partial(self._begins, number)
            self._handles += [
                before_forward(module, begins),
                after_forward(module, self._ends),
            ]

    def _is_forward(self) -> bool:
        lanes = self._watch.lanes
        return get_ident() == lanes.thread and lanes.current != BACKWARD

    def _begins(self, number: int, module: Any, args: Any) -> None:
        if self._is_forward() and self._torch.is_grad_enabled():
            node = self._torch._C._autograd._get_sequence_nr()
            self._calls.append([number, perf_counter_ns(), node, 0])

    def _ends(self, module: Any, args: Any, output: Any) -> None:
        now = perf_counter_ns()
        if not (self._calls and self._is_forward() and self._torch.is_grad_enabled()):
            return
        wanted = self._numbers.get(id(module))
        while self._calls:  # a call that raised has not ended
            number, began, node, within = self._calls.pop()
            if number == wanted:
                break
        else:
            return
        self._of[number].forward += now - began - within
        if self._calls:
            self._calls[-1][3] += now - began
        last = self._torch._C._autograd._get_sequence_nr()
        if last > node:
            self._spans.append((node, last, number))

    # -- backward ---------------------------------------------------------------------------------

    def _backward_begins(self, tensors: Any) -> None:
        if not self._spans:
            return
        roots = [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors)
        self._ran.clear()  # nodes of a backward pass that has failed
        nodes = self._graph([root.grad_fn for root in roots if root.grad_fn is not None])
        if len(nodes) <= _NODES:
            for number, node in self._owned(nodes):
                operator = "" if _adds_up(node) else _END.sub("", node.name())
                runs = partial(self._runs, number, operator)
                self._handles.append(unnumbered(node.register_prehook(runs)))
        self._spans.clear()

    def _graph(self, todo: list[Any]) -> list[Any]:
        known = dict.fromkeys(todo)
        while todo and len(known) <= _NODES:
            for node, _ in todo.pop().next_functions:
                if node is not None and node not in known:
                    known[node] = None
                    todo.append(node)
        return list(known)

    def _owned(self, nodes: list[Any]) -> Iterator[tuple[int, Any]]:
        spans = sorted(self._spans, key=lambda span: (span[0], -span[1]), reverse=True)
        around: list[tuple[int, int, int]] = []
        numbered = []
        for node in nodes:
            if _adds_up(node):
                yield self._numbers.get(id(node.variable), -1), node
            else:
                numbered.append((node._sequence_nr(), node))
        for place, node in sorted(numbered, key=lambda pair: pair[0]):
            while spans and spans[-1][0] <= place:
                around.append(spans.pop())
            while around and around[-1][1] <= place:
                around.pop()
            yield (around[-1][2] if around else -1), node

    def _runs(self, number: int, operator: str, gradients: Any) -> None:
        if not self._ran:
            # The callback runs after all nodes.
            self._torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        self._ran.append((number, operator, perf_counter_ns()))

    def _backward_ends(self) -> None:
        self._ran.append((-1, "", perf_counter_ns()))
        for at, (number, operator, began) in enumerate(self._ran[:-1]):
            took = self._ran[at + 1][2] - began
            self._of[number].backward += took
            self._of[number].operators[operator] += took
        self._ran.clear()

    # -- results ----------------------------------------------------------------------------------

    def _remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _end_step(self) -> None:
        spent = self._watch.lanes.spent
        now, (forward, backward) = (spent[FORWARD], spent[BACKWARD]), self._since
        self._lanes_ns.append((now[0] - forward, now[1] - backward))
        self._steps.append(self._of)
        self._since, self._of = now, defaultdict(_Of)

    def _typical(self) -> Iterator[tuple[int, _Of]]:
        for number in {number for step in self._steps for number in step}:
            steps = [step[number] for step in self._steps if number in step]
            least = min(steps, key=lambda of: of.backward)
            forward = min(of.forward for of in steps)
            yield number, _Of(forward, least.backward, least.operators)

    def ms_of(self, names: Iterable[str], observation: Observation) -> float | None:
        """Return forward and backward ms per step of the modules with these names.

        The time of child modules is left out. None where none of the modules was measured.
        """
        wanted = set(names)
        each = self._each(observation)
        mine = [own for name, kind, own, _ in each if kind is not None and name in wanted]
        return sum(one.forward_ms + one.backward_ms for one in mine) if mine else None

    def _each(self, observation: Observation) -> Iterator[tuple[str, Any, ModuleTime, _Of]]:
        lanes = ("forward", "backward")
        least = [min(each, default=0) for each in zip(*self._lanes_ns, strict=True)]
        if not (any(self._steps) and all(least)):
            return  # no modules were measured, or no step was complete
        forward, backward = (
            (observation.lanes_ms.get(lane) or 0.0) / ns
            for lane, ns in zip(lanes, least, strict=True)
        )
        for number, of in self._typical():
            name, kind = self._names[number] if number >= 0 else ("", None)
            own = ModuleTime(name, "" if kind is None else kind.__name__, 1)
            own.forward_ms, own.backward_ms = forward * of.forward, backward * of.backward
            yield name, kind, own, of

    def results(self, observation: Observation) -> list[ModuleTime]:
        """Return the modules grouped by class and position, in order of decreasing time."""
        groups: dict[tuple[str, str], ModuleTime] = {}
        operators: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for name, kind, own, of in self._each(observation):
            key = _NUMBER.sub("*", name), own.kind
            one = groups.setdefault(key, ModuleTime(name, own.kind))
            one.count += 1
            one.name = name if one.count == 1 else key[0]
            one.forward_ms += own.forward_ms
            one.backward_ms += own.backward_ms
            if kind is None or not kind.__module__.startswith("torch.nn."):
                for operator, ns in of.operators.items():
                    operators[key][operator] += ns
        for key, took in operators.items():
            operator, ns = max(took.items(), key=lambda item: item[1], default=("", 0))
            groups[key].operator = operator if ns >= _MOST * sum(took.values()) else ""
        told = sorted(groups.values(), key=lambda one: -(one.forward_ms + one.backward_ms))
        return told[:_TOLD]
