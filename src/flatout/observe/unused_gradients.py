"""Gradients that backward computes but no optimizer uses, in a training's first steps.

There are two cases. First, a loss reaches parameters of another optimizer that lie before the
parameters of its own optimizer. An example is a discriminator loss on generated samples that were
not detached. These gradients are zeroed before that optimizer steps, or added to its gradients.
Second, a loss reaches a model without any parameter in an optimizer, such as a teacher or a target
network. The gradients of such a model accumulate. A model of an earlier training, whose optimizer
no longer steps, is in the second case.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from flatout.hooks import is_anything_compiled, unnumbered, wrap
from flatout.observe.later_backwards import LaterBackwards
from flatout.observe.model_facts import local
from flatout.observe.observation import Site, UnusedGradients
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Number of steps after which all optimizers have stepped, so that the optimizer of each parameter
# is known.
_FROM = 1
# Number of steps after the first step of a new optimizer. An earlier optimizer that has not stepped
# in them belongs to an earlier training.
_RESTS = 20
# Maximum number of later optimizers that start a new observation: some scripts make one in each
# step.
_LATER = 4
# _NODES: maximum number of graph nodes that are followed; _ASKED: maximum number of parameters of a
# group whose gradients are compared with zero.
_NODES, _ASKED = 20_000, 8


@dataclass(eq=False)
class _Group:
    """Parameters of an optimizer, or of a model that no optimizer steps."""

    owner: Any  # a SeenOptimizer or a SeenModel
    is_stepped: bool
    parameters: list[Any]

    @property
    def has_gradient(self) -> bool:
        having = [item for item in self.parameters if item.grad is not None]
        smallest = sorted(having, key=lambda item: int(item.numel()))[:_ASKED]
        return any(not item.grad.is_sparse and bool(local(item.grad).any()) for item in smallest)


@dataclass(eq=False)
class _Pass:
    """A backward pass, with the indices of the parameter groups that it has reached.

    Attributes:
        elements: by group, number of elements of the reached parameters.
        behind: for each group, the groups to which gradients pass on through this group.
        site: the user's line.
        then: the next group that was stepped; None before that.
    """

    elements: dict[int, int]
    behind: dict[int, set[int]]
    site: Site | None
    then: int | None = None


class GradientUse:
    """Tracker of gradients, from the backward passes to the steps that use them.

    Attributes:
        looks: number of backward passes that were followed.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._made: WeakSet[Any] = WeakSet()
        wrap(torch.optim.Optimizer, "__init__", "observe", self._noted)
        self._handle: Any = None
        self._backwards = LaterBackwards(torch, watch, self._backward_begins)
        self._renew()
        watch.before_backward.append(self._backward_begins)
        watch.at(AFTER_STEPS, self._end)
        watch.on_new_optimizer.append(self._comes_later)
        watch.on_renewal.append(self._renew)

    @property
    def made(self) -> list[Any]:
        """All optimizers that exist."""
        return list(self._made)

    def _noted(self, original: Any) -> Any:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made.add(optimizer)

        return init

    def _renew(self) -> None:
        self.looks = 0
        self._stepped = 0  # number of known optimizers when the groups were formed
        self._groups: list[_Group] = []
        self._known: dict[int, int] = {}
        # Backward passes that have reached each group since the group was stepped or zeroed.
        self._open: dict[int, list[_Pass]] = {}
        self._last: list[_Pass] = []
        self._found: dict[tuple[int, int, str], UnusedGradients] = {}
        self._elements = 0
        self._times: Counter[int] = Counter()  # steps of each group's optimizer
        self._later = 0
        self._resting: set[int] = set()  # ids of SeenOptimizers of earlier trainings
        self._told: list[UnusedGradients] = []  # findings in earlier trainings
        self._end()
        self._listen()

    def _listen(self) -> None:
        hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook
        self._handle = unnumbered(hook(self._steps))

    def _comes_later(self) -> None:
        steps = self._watch.lanes.steps
        if steps < AFTER_STEPS or self._later == _LATER:
            return
        self._later += 1
        counts = {id(item): item.steps for item in self._watch.optimizers}
        self._watch.at(steps + _RESTS, lambda: self._begin_again(counts))

    def _begin_again(self, counts: dict[int, int]) -> None:
        if self._handle is not None or is_anything_compiled():
            return
        watched = self._watch.optimizers
        self._resting = {id(item) for item in watched if item.steps == counts.get(id(item))}
        self._told += [
            item for then, item in self._shared() if id(self._groups[then].owner) in self._resting
        ]
        for model in self._watch.models:
            model.ask_site()
        self._stepped = 0
        self._listen()
        self._backwards.open()
        self._watch.at(self._watch.lanes.steps + AFTER_STEPS, self._end)

    def _end(self) -> None:
        self._backwards.close()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._open.clear()
        self._last.clear()

    def results(self) -> list[UnusedGradients]:
        """Return the findings that were made more than once."""
        return [*self._told, *(item for _, item in self._shared())]

    def _shared(self) -> Iterator[tuple[int, UnusedGradients]]:
        for (_, then, _), item in self._found.items():
            if item.count > 1:
                # The share assumes one pass for each step of the optimizer that it was for.
                item.share = min(1.0, item.elements * self._times[then] / max(1, self._elements))
                yield then, item

    # -- events -----------------------------------------------------------------------------------

    def _backward_begins(self, tensors: Any) -> None:
        if self._watch.lanes.steps < _FROM or self._handle is None:
            return
        if self._stepped != len(self._watch.optimizers):
            self._stepped = len(self._watch.optimizers)
            self._find_groups()
        if len(self._groups) < 2:
            return
        roots = [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors)
        done = self._pass([root.grad_fn for root in roots if root.grad_fn is not None])
        self.looks += 1
        self._elements += sum(done.elements.values())
        for number in done.elements:
            self._reaches(number, done)
        self._last.append(done)

    def _reaches(self, number: int, done: _Pass) -> None:
        group, before = self._groups[number], self._open.setdefault(number, [])
        is_left = bool(before) and group.has_gradient
        if not group.is_stepped:
            if is_left:
                self._keep(before[-1], number, "kept")
            before[:] = [done]
            return
        if not is_left:
            for item in before:
                self._keep(item, number, "zeroed")
            before.clear()
        before.append(done)

    def _steps(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        if self._torch.compiler.is_dynamo_compiling():
            return
        number = next((at for at, item in enumerate(self._groups) if _is_of(item, optimizer)), None)
        if number is None:
            return
        self._times[number] += 1
        for done in self._last:
            done.then = number
        self._last.clear()
        waiting = self._open.pop(number, [])
        newest = waiting[-1] if waiting else None
        if newest is None or newest.then != number:
            return
        for item in waiting[:-1]:
            # Both optimizers got gradients from the other's loss: the losses are adversarial.
            if item.then not in (None, number) and item.then in newest.elements:
                self._keep(item, number, "added")

    def _keep(self, done: _Pass, number: int, fate: str) -> None:
        if done.then is None or done.then == number:
            return
        passes_on = done.then in done.behind.get(number, ())
        if passes_on and self._groups[number].is_stepped:
            return  # the gradient passes through to the stepped parameters, as in a discriminator
        key = (number, done.then, fate)
        gradients = self._found.get(key)
        if gradients is None:
            owner, then = self._groups[number].owner, self._groups[done.then].owner
            model = owner if not self._groups[number].is_stepped else self._model_of(number)
            gradients = self._found[key] = UnusedGradients(
                fate=fate,
                model="" if model is None else model.facts.kind.rpartition(".")[2],
                called_at=None if model is None else model.later_site or model.site,
                backward_at=done.site,
                stepped_at=then.facts.site,
                passes_on=passes_on,
                parameters=len(self._groups[number].parameters),
            )
        gradients.count += 1
        gradients.elements = max(gradients.elements, done.elements[number])

    # -- groups of parameters ---------------------------------------------------------------------

    def _find_groups(self) -> None:
        for kept in (self._groups, self._known, self._open, self._last, self._found, self._times):
            kept.clear()
        self.looks = self._elements = 0
        stepping = [item for item in self._watch.optimizers if id(item) not in self._resting]
        resting = [item.ref() for item in self._watch.optimizers if id(item) in self._resting]
        for watched in stepping:
            self._add(watched, True, [item for item in watched.tensors() if item.requires_grad])
        made = [item for item in self._made if not any(item is other for other in resting)]
        owned = {
            id(item)
            for optimizer in [*made, *(watched.ref() for watched in stepping)]
            for group in getattr(optimizer, "param_groups", ())
            for item in group["params"]
        } | set(self._known)
        for model in self._watch.models:
            module = model.ref()
            if module is None or not model.has_parameters:
                continue
            own = list(module.parameters())
            if not any(id(item) in owned for item in own):
                self._add(model, False, [item for item in own if item.requires_grad])

    def _add(self, owner: Any, is_stepped: bool, parameters: list[Any]) -> None:
        mine = [item for item in parameters if id(item) not in self._known]
        if mine:
            self._known |= dict.fromkeys(map(id, mine), len(self._groups))
            self._groups.append(_Group(owner, is_stepped, mine))

    def _model_of(self, number: int) -> Any:
        wanted = {id(item) for item in self._groups[number].parameters}
        having = []
        for model in self._watch.models:
            module = model.ref()
            if module is not None and any(id(item) in wanted for item in module.parameters()):
                having.append(model)
        return having[0] if len(having) == 1 else None

    # -- graphs -----------------------------------------------------------------------------------

    def _pass(self, roots: list[Any]) -> _Pass:
        elements: dict[int, int] = {}
        behind: dict[int, set[int]] = {}
        reached: dict[Any, frozenset[int]] = {}
        # The group whose parameter a node passes on, such as a transposed weight.
        own: dict[Any, int | None] = {}
        for node in _from_leaves(roots):
            if node.name() == "torch::autograd::AccumulateGrad":
                number = self._known.get(id(node.variable))
                own[node] = number
                reached[node] = frozenset() if number is None else frozenset((number,))
                if number is not None:
                    elements[number] = elements.get(number, 0) + int(node.variable.numel())
                continue
            inner = [item for item, _ in node.next_functions if item is not None]
            inner = [item for item in inner if item in reached]
            own[node] = own[inner[0]] if len(inner) == 1 else None
            reached[node] = frozenset[int]().union(*(reached[item] for item in inner))
            for item in inner if len(inner) > 1 else ():
                mine = own[item]
                if mine is not None:
                    others = (reached[other] for other in inner if other is not item)
                    behind.setdefault(mine, set()).update(*others)
        return _Pass(elements, behind, here())


def _is_of(group: _Group, optimizer: Any) -> bool:
    return group.is_stepped and group.owner.ref() is optimizer


def _from_leaves(roots: list[Any]) -> Iterator[Any]:
    known: set[Any] = set()
    todo = [(root, False) for root in roots]
    while todo and len(known) < _NODES:
        node, is_done = todo.pop()
        if is_done:
            yield node
        elif node not in known:
            known.add(node)
            todo.append((node, True))
            todo += [(item, False) for item, _ in node.next_functions if item is not None]
    yield from (node for node, is_done in reversed(todo) if is_done)
