"""Gradients that optimizers step with in the first steps: none, or only of the last batch.

Gradients that are zeroed before any step uses them were computed in vain. That happens where
batches should be accumulated, but each batch zeroes the gradients of the previous batch.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import Any

from flatout.hooks import Hook, is_anything_compiled, unnumbered, wrap
from flatout.observe.model_facts import local
from flatout.observe.observation import Site
from flatout.observe.optimizers import SeenOptimizer
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Steps between which each optimizer's gradients are inspected: _FROM and _UNTIL.
_FROM, _UNTIL = 1, 12
# Number of smallest parameters, of which one that has a gradient is followed.
_ASKED = 8


class _Followed:
    """The gradient of one parameter, from one step to the next.

    Attributes:
        tensor: the parameter.
        passes: batch and line of each backward pass since the last step.
        pending: number of passes whose gradients the next step would use.
        discarded: number of passes whose gradients were zeroed.
        zeroed_at: the line that zeroed them.
    """

    def __init__(self, torch: Any, tensor: Any) -> None:
        self.tensor = tensor
        # A hook on the tensor itself would be visible in the tensor's attributes.
        self._node = torch.autograd.graph.get_gradient_edge(tensor).node
        self.handle = unnumbered(self._node.register_hook(self._added))
        self.begin()

    def begin(self) -> None:
        self.passes: list[tuple[Any, Site | None]] = []
        self.pending = self.discarded = 0
        self.zeroed_at: Site | None = None
        self._gradient: Any = None
        self._was_set = False

    def _added(self, *gradients: Any) -> None:
        self.pending += 1
        self._gradient = self.tensor.grad

    def look(self) -> None:
        self._was_set = self._is_set()

    def look_again(self, site: Site | None) -> None:
        if self._was_set and not self._is_set():
            self.discarded += self.pending
            self.pending = 0
            self.zeroed_at = site

    def _is_set(self) -> bool:
        gradient = self.tensor.grad
        return gradient is not None and bool(local(gradient).any())

    @property
    def is_of_last(self) -> bool:
        if not (self.discarded and self.pending) or self.tensor.grad is not self._gradient:
            return False
        batches = [batch for batch, _ in self.passes]
        lines = {site for _, site in self.passes}
        return len({*batches}) == len(batches) > 1 and None not in batches and len(lines) == 1


class StepGradients:
    """Inspection of the gradients before each step, and where they are zeroed."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._handle: Any = None
        self._hooks: list[Hook] = []
        self._followed: _Followed | None = None
        self._renew()
        watch.before_backward.append(self._backward_begins)
        watch.at(_FROM, self._open)
        watch.at(AFTER_STEPS, self._end_following)
        watch.at(_UNTIL, self._end)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._rounds: list[bool] = []
        self._end()

    def _open(self) -> None:
        if is_anything_compiled():
            return
        optimizers = sys.modules["torch.optim.optimizer"]
        self._handle = unnumbered(optimizers.register_optimizer_step_pre_hook(self._steps))
        for owner in (self._torch.optim.Optimizer, self._torch.nn.Module):
            self._hooks.append(wrap(owner, "zero_grad", "observe", self._zeroing))

    def _end_following(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if self._followed is not None:
            self._followed.handle.remove()
            self._followed = None

    def _end(self) -> None:
        self._end_following()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # -- each optimizer ---------------------------------------------------------------------------

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        given = [*args[1:], *kwargs.values()] if args and args[0] is optimizer else [*args]
        if get_ident() != self._watch.lanes.thread or any(map(callable, given)):
            return
        seen = next((one for one in self._watch.optimizers if one.ref() is optimizer), None)
        if seen is not None:
            self._watch.aside(lambda: self._look(seen), is_once=True)

    def _look(self, optimizer: SeenOptimizer) -> None:
        mine = [tensor for tensor in optimizer.tensors() if tensor.requires_grad]
        if mine:
            without, of = optimizer.facts.steps_without or (0, 0)
            has_none = all(tensor.grad is None for tensor in mine)
            optimizer.facts.steps_without = without + has_none, of + 1
        if len(self._watch.optimizers) == 1 and self._hooks:
            self._round_ends(optimizer)

    # -- batches of one step ----------------------------------------------------------------------

    def _backward_begins(self, tensors: Any) -> None:
        if self._followed is not None:
            loaders = self._watch.loaders
            batch: Any = sum(loader.batches for loader in loaders if loader.in_training)
            self._followed.passes.append((batch or self._watch.rows, here()))

    def _zeroing(self, original: Any) -> Any:
        lanes = self._watch.lanes

        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            followed = self._followed
            if followed is None or not followed.pending or get_ident() != lanes.thread:
                return original(owner, *args, **kwargs)
            site = here(1)
            self._watch.aside(followed.look)
            result = original(owner, *args, **kwargs)
            self._watch.aside(lambda: followed.look_again(site))
            return result

        return zero_grad

    def _round_ends(self, optimizer: SeenOptimizer) -> None:
        followed = self._followed
        if followed is None:
            self._follow(optimizer)
            return
        self._rounds.append(followed.is_of_last)
        if all(self._rounds):
            lost, of = optimizer.facts.discarded or (0, 0)
            every = followed.discarded + followed.pending
            optimizer.facts.discarded = lost + followed.discarded, of + every
            optimizer.facts.discarded_site = followed.zeroed_at
        else:
            optimizer.facts.discarded = None
        followed.begin()

    def _follow(self, optimizer: SeenOptimizer) -> None:
        having = [one for one in optimizer.tensors() if one.grad is not None]
        dense = [one for one in having if one.is_leaf and not one.grad.is_sparse]
        smallest = sorted(dense, key=lambda one: int(one.numel()))[:_ASKED]
        chosen = next((one for one in smallest if bool(local(one.grad).any())), None)
        if chosen is not None:
            self._followed = _Followed(self._torch, chosen)
