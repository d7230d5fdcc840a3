"""Models that are called in each step and never trained, such as a teacher, but are in train mode.

For each such model are recorded: its layers that drop or update statistics, whether the running
statistics of its BatchNorms have changed, and the share of numbers that a dropout has set to zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

from flatout.hooks import after_forward, before_forward, is_anything_compiled
from flatout.observe.inside import acts_in_training
from flatout.observe.model_facts import local, some_of, unwrapped
from flatout.observe.models import SeenModel
from flatout.observe.observation import Teacher
from flatout.observe.replicas import number_of
from flatout.observe.sites import here
from flatout.observe.unused_gradients import GradientUse
from flatout.observe.watch import Watch

# Steps of each training between which such models are hooked: _FROM and _UNTIL.
_FROM, _UNTIL = 4, 8
# _MATRICES: maximum number of weight matrices that are compared; _NUMBERS: maximum number of
# elements of each matrix.
_MATRICES, _NUMBERS = 8, 1024
# Largest relative distance of the weights of a copy from those of a trained model.
_COPY = 0.5


class Teachers:
    """Inspection of models that no optimizer steps, in a few steps of each training."""

    def __init__(self, torch: Any, watch: Watch, uses: GradientUse) -> None:
        self._torch = torch
        self._watch = watch
        self._uses = uses
        self._looks: list[_Look] = []
        self._seen: list[_Look] = []
        watch.at_each(_FROM, self._open)
        watch.at_each(_UNTIL, self._close)
        watch.at(2 * _UNTIL, self._confirm)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._close()
        self._seen.clear()

    def results(self) -> list[Teacher]:
        """Return the models whose weights have not changed, and that no optimizer has stepped."""
        return [look.teacher for look in self._seen if look.is_untouched()]

    def _confirm(self) -> None:
        for look in self._seen:
            look.confirm()
        self._watch.at(2 * self._watch.lanes.steps, self._confirm, is_once=True)

    def _open(self) -> None:
        if is_anything_compiled():
            return  # hooks would make torch.compile compile again
        for seen in self._watch.models:
            module = seen.ref()
            plain = not (seen.facts.is_told or isinstance(module, self._torch.jit.ScriptModule))
            if module is None or not plain or not seen.has_parameters:
                continue
            if any(map(_acts, module.modules())) and self._may_be(module):
                self._looks.append(_Look(self._torch, self._watch, seen, self._owners(module)))

    def _close(self) -> None:
        while self._looks:
            look = self._looks.pop()
            if look.ends():
                self._seen.append(look)

    def _may_be(self, module: Any) -> bool:
        owners = self._owners(module)
        stepping = [item.ref() for item in self._watch.stepping()]
        known = [item.ref() for item in self._watch.optimizers]
        if any(_is_in(one, stepping) or not _is_in(one, known) for one in owners):
            return False
        trained = {
            id(tensor) for one in stepping for group in _groups(one) for tensor in group["params"]
        }
        for other in self._watch.models:
            inner = other.ref()
            if inner is not None and inner is not module:
                own = {id(tensor) for tensor in inner.parameters()}
                if not own.isdisjoint(trained) and _is_near(module, inner):
                    return False
        return True

    def _owners(self, module: Any) -> list[Any]:
        own = {id(tensor) for tensor in module.parameters()}
        return [
            one
            for one in self._uses.made
            if any(id(tensor) in own for group in _groups(one) for tensor in group["params"])
        ]


class _Look:
    """Hooks on one model, and their findings."""

    def __init__(self, torch: Any, watch: Watch, seen: SeenModel, owners: list[Any]) -> None:
        module: Any = seen.ref()
        self._torch, self._watch, self._seen = torch, watch, seen
        self._owned = [item for item in watch.optimizers if _is_in(item.ref(), owners)]
        self._steps_before = [item.steps for item in self._owned]
        self._weights = number_of(list(module.parameters()))
        self._norms = {name: number_of(values) for name, values in _statistics(module)}
        self._in_steps: set[int] = set()
        self._tracked = False  # whether the model's output requires a gradient
        self._is_confirmed = False
        acting = [inner for inner in module.modules() if _acts(inner)]
        kinds = Counter(type(inner).__name__ for inner in acting)
        self.teacher = Teacher(seen.facts.kind, layers=dict(kinds))
        self._handles = [
            before_forward(module, self._begins),
            after_forward(module, self._gives),
        ]
        drops = next((inner for inner in acting if "Dropout" in type(inner).__name__), None)
        if drops is not None:
            self._handles.append(after_forward(drops, self._drops))

    def _begins(self, module: Any, args: Any) -> None:
        if not any(map(_acts, module.modules())):
            return  # the model is in eval mode now
        self._in_steps.add(self._watch.lanes.steps)
        if self.teacher.site is None:
            self.teacher.site = here(1)

    def _gives(self, module: Any, args: Any, output: Any) -> None:
        self._tracked |= any(tensor.requires_grad for tensor in _tensors(self._torch, output))

    def _drops(self, module: Any, args: Any, output: Any) -> None:
        given: Any = args[0] if args else None
        if self.teacher.dropped is None and self._torch.is_tensor(given):
            with self._torch.no_grad():
                had = int((given != 0).sum())
                left = int((output != 0).sum())
            self.teacher.dropped = 1 - left / had if had else None

    def ends(self) -> bool:
        while self._handles:
            self._handles.pop().remove()
        module = self._seen.ref()
        if module is None or len(self._in_steps) < _UNTIL - _FROM:
            return False
        if self._tracked and (
            self._owned or any(tensor.grad is not None for tensor in module.parameters())
        ):
            return False  # gradients pass through it
        moved = [name for name, now in _statistics(module) if self._norms[name] != number_of(now)]
        self.teacher.moved = len(moved)
        return True

    def confirm(self) -> None:
        if self._seen.ref() is not None:
            self._is_confirmed = self.is_untouched()

    def is_untouched(self) -> bool:
        module = self._seen.ref()
        if module is None:
            return self._is_confirmed
        steps = [item.steps for item in self._owned]
        return steps == self._steps_before and number_of(list(module.parameters())) == self._weights


def _acts(module: Any) -> bool:
    return acts_in_training(module) and getattr(module, "p", 1) != 0


def _statistics(module: Any) -> Iterator[tuple[str, list[Any]]]:
    for name, inner in module.named_modules():
        mean = getattr(inner, "running_mean", None)
        if mean is not None and inner.training and "BatchNorm" in type(inner).__name__:
            yield name, [mean, inner.running_var]


def _tensors(torch: Any, output: Any) -> Iterator[Any]:
    if torch.is_tensor(output):
        yield output
    elif isinstance(output, dict):
        for item in output.values():
            yield from _tensors(torch, item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(torch, item)


def _is_near(module: Any, other: Any) -> bool:
    theirs = dict(unwrapped(other)[-1].named_parameters())
    apart = [
        _apart(tensor, theirs[name])
        for name, tensor in unwrapped(module)[-1].named_parameters()
        if name in theirs and tensor.dim() > 1 and tensor.shape == theirs[name].shape
    ][:_MATRICES]
    return bool(apart) and median(apart) < _COPY


def _apart(one: Any, other: Any) -> float:
    a, b = (some_of(local(tensor.detach()), _NUMBERS).double().cpu() for tensor in (one, other))
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-12))


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return getattr(optimizer, "param_groups", None) or []


def _is_in(optimizer: Any, some: list[Any]) -> bool:
    return any(one is optimizer for one in some)
