"""Copies of a model that compute targets for its loss, and never change during training.

A copy is recognized before the first step. None of its parameters belongs to an optimizer, and all
are bitwise equal to those of a trained model. Both models are freshly initialized. The copy gets
other samples than the trained model, as a target network gets the next states. Or both models get
both views of the samples, and a further trained model gets the trained model's output, as in BYOL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

from flatout.hooks import is_anything_compiled
from flatout.observe.model_facts import local, unwrapped
from flatout.observe.models import SeenModel
from flatout.observe.observation import StillTarget
from flatout.observe.replicas import number_of
from flatout.observe.unused_gradients import GradientUse
from flatout.observe.watch import Watch

# _STEPS: number of first steps in which inputs are compared; _MODELS: maximum number of models that
# are compared.
_STEPS, _MODELS = 4, 16
# Number of views of the samples in each step.
_VIEWS = 2
# _HELD: maximum number of parameters that are checked for changes; _NUMBERS: maximum number of
# elements of each such parameter.
_HELD, _NUMBERS = 4, 2**18
# Smallest share of steps that call the copy: a copy that is called less was replaced by another
# copy.
_CALLED = 0.9
# Factor on the bound of torch's initialization, to allow for rounding.
_WITHIN = 1.001


@dataclass
class _Pair:
    """A copy and the trained model.

    Attributes:
        copy, model: both models.
        own, theirs: some parameters of the copy and of the trained model, kept so that they can be
            read after the models are gone.
        numbers: hashes of the parameters in `own` and in `theirs` at the beginning.
    """

    copy: SeenModel
    model: SeenModel
    own: list[Any]
    theirs: list[Any]
    numbers: tuple[int, int]

    @property
    def is_still(self) -> bool:
        own, theirs = self.numbers
        return number_of(self.own) == own and number_of(self.theirs) != theirs


class StillTargets:
    """Search for copies before the first step, and check of their weights at the end."""

    def __init__(self, torch: Any, watch: Watch, uses: GradientUse) -> None:
        self._torch = torch
        self._watch = watch
        self._uses = uses
        self._renew()
        watch.on_batch.append(self._called)
        watch.with_gradients.append(self._find)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._pairs: list[_Pair] = []
        self._is_asked = False
        self._inputs: dict[int, set[tuple[int, int]]] = {}  # inputs by id of a SeenModel
        self._going_on: set[int] = set()  # ids of models that get another model's output

    def _called(self, model: SeenModel, batch: Any, is_trained: bool) -> None:
        step = self._watch.lanes.steps
        if step < _STEPS and self._torch.is_tensor(batch) and batch.numel():
            known = self._inputs.setdefault(id(model), set())
            known.add((step, number_of([local(batch)])))
            if is_trained and batch.grad_fn is not None:
                self._going_on.add(id(model))

    def _find(self) -> None:
        if self._is_asked or self._watch.lanes.steps or is_anything_compiled():
            return
        self._is_asked = True
        stepped = {
            id(tensor)
            for optimizer in self._uses.made
            for group in getattr(optimizer, "param_groups", None) or []
            for tensor in group["params"]
        }
        trained, others = [], []
        for seen in self._watch.models[:_MODELS]:
            module = seen.ref()
            if module is None or seen.facts.is_told or not seen.has_parameters:
                continue
            own = dict(unwrapped(module)[-1].named_parameters())
            if not any(id(tensor) in stepped for tensor in own.values()):
                others.append((seen, module, own))
            elif all(id(tensor) in stepped for tensor in own.values()):
                trained.append((seen, own))
        self._pairs += [
            _pair(seen, own, model, theirs)
            for seen, module, own in others
            for model, theirs in trained
            if _are_equal(own, theirs) and is_fresh(self._torch, module)
        ]

    def results(self) -> list[StillTarget]:
        """Return the copies that have not changed, of models that have."""
        steps = self._watch.lanes.steps
        return [
            StillTarget(pair.copy.facts.kind, pair.copy.site, steps)
            for pair in self._pairs
            if pair.copy.calls >= _CALLED * steps and self._gets_others(pair) and pair.is_still
        ]

    def _gets_others(self, pair: _Pair) -> bool:
        own, theirs = (self._inputs.get(id(item), set()) for item in (pair.copy, pair.model))
        if not own or not theirs:
            return False
        steps = [step for step, _ in own]
        has_both = own == theirs and all(steps.count(step) == _VIEWS for step in steps)
        is_predicted = bool(self._going_on - {id(pair.copy), id(pair.model)})
        return own.isdisjoint(theirs) or (has_both and is_predicted)


def _are_equal(own: dict[str, Any], theirs: dict[str, Any]) -> bool:
    if [(n, t.shape) for n, t in own.items()] != [(n, t.shape) for n, t in theirs.items()]:
        return False
    return number_of([*map(local, own.values())]) == number_of([*map(local, theirs.values())])


def _pair(copy: SeenModel, own: dict[str, Any], model: SeenModel, theirs: dict[str, Any]) -> _Pair:
    names = sorted(
        (name for name, tensor in theirs.items() if tensor.requires_grad and tensor.numel()),
        key=lambda name: int(theirs[name].numel()),
    )
    chosen = [name for name in names if theirs[name].numel() <= _NUMBERS][:_HELD]
    mine, others = ([some[name] for name in chosen] for some in (own, theirs))
    return _Pair(copy, model, mine, others, (number_of(mine), number_of(others)))


def is_fresh(torch: Any, module: Any) -> bool:
    """Return whether a module's weights look freshly initialized, never trained.

    Norms then multiply by 1 or 0 and add 0. Biases are 0, or lie with their weights within the
    bound of torch's initialization. Weights without a bias may be initialized differently in a
    model with norms.
    """
    with torch.no_grad():
        signs = [*_signs(torch, module)]
    has_norms = any(kind == "norm" for kind, _ in signs)
    needed = [is_one for kind, is_one in signs if kind != "weight" or not has_norms]
    return bool(needed) and all(needed)


def _signs(torch: Any, module: Any) -> Iterator[tuple[str, bool]]:
    for inner in module.modules():
        weight, bias = inner._parameters.get("weight"), inner._parameters.get("bias")
        if weight is None or not weight.is_floating_point() or weight.is_meta:
            continue
        name = type(inner).__name__
        if "Norm" in name and weight.dim() == 1:
            is_zero = bias is None or not bool(bias.any())
            yield "norm", is_zero and bool(((weight == 1) | (weight == 0)).all())
        elif name.startswith(("Linear", "Conv")) and weight.dim() > 1:
            fan_in, _ = torch.nn.init._calculate_fan_in_and_fan_out(weight)
            bound = _WITHIN / sqrt(fan_in)
            is_within = bool(weight.abs().max() <= bound)
            if bias is None:
                yield "weight", is_within
            else:
                is_small = is_within and bool(bias.abs().max() <= bound)
                yield "layer", is_small or not bool(bias.any())
