"""Check if a model that is to predict the next token sees it: its mask is missing or wrong.

In a step of each training, the target of the loss is compared with the model's input tokens
(shifted_targets.py). If it equals them, shifted by one, the model is called again after the step
(called_again.py), with one token replaced. Outputs before that token must not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flatout.hooks import after_forward, is_anything_compiled
from flatout.observe.called_again import sees_ahead
from flatout.observe.later_backwards import LaterBackwards
from flatout.observe.model_facts import without_ddp
from flatout.observe.models import SeenModel
from flatout.observe.observation import SeenAhead, Site
from flatout.observe.shifted_targets import Place, place_in
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Steps between which calls are recorded, from _FROM to _UNTIL. At step _UNTIL, no other hooks
# inspect calls of layers.
_FROM, _UNTIL = 2, 3
# Maximum number of backward passes that are inspected.
_LOOKS = 4
# Longest step in ns after which the model is called at once. After a longer step, the call waits
# until two forwards are a small share of the observed time.
_LONG_NS = 1_500_000_000


class _Call(NamedTuple):
    """A call of a model, with its arguments and output."""

    seen: SeenModel
    given: dict[str, Any]
    gave: Any
    site: Site | None


class NextTokens:
    """Inspection of the trained models in a step of each training.

    Attributes:
        found: models that see the token they are to predict.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._later = LaterBackwards(torch, watch, self._look)
        self._handles: list[Any] = []
        self._begin()
        self.found: list[SeenAhead] = []
        watch.before_backward.append(self._look)
        watch.at_each(_FROM, self._open)
        watch.at_each(_UNTIL, self._close)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._end()
        self.found.clear()

    def _begin(self) -> None:
        self._calls: list[_Call] = []  # calls since the last backward pass
        self._looks = 0
        self._chosen: tuple[SeenModel, Place, Site | None] | None = None

    def _open(self) -> None:
        if is_anything_compiled():
            return  # a second call would compile the model again
        for seen in self._watch.models:
            module = without_ddp(seen.ref())
            is_script = isinstance(module, self._torch.jit.ScriptModule)
            if module is not None and seen.is_stepped and not (seen.facts.is_told or is_script):
                hook = self._noting(seen)
                self._handles.append(after_forward(module, hook, with_kwargs=True))
        if self._handles:
            self._later.open()

    def _noting(self, seen: SeenModel) -> Callable[..., None]:
        def gives(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if module.training and self._torch.is_grad_enabled() and len(self._calls) < 2:
                given = {"args": args, "kwargs": kwargs}
                self._calls.append(_Call(seen, given, output, here(1)))

        return gives

    def _look(self, tensors: Any) -> None:
        calls, self._calls = self._calls, []
        roots = [tensors] if self._torch.is_tensor(tensors) else list(tensors)
        if len(calls) != 1 or len(roots) != 1 or roots[0].grad_fn is None:
            return
        if self._chosen is not None or self._looks == _LOOKS:
            return
        self._looks += 1
        (call,) = calls
        module = without_ddp(call.seen.ref())
        try:
            place = place_in(self._torch, module, call.given, call.gave, roots[0].grad_fn)
        except (RuntimeError, NotImplementedError):
            return  # saved tensors that were freed, or tensors of a kind without them
        if place is not None:
            self._chosen = call.seen, place, call.site

    def _close(self) -> None:
        chosen = self._chosen
        self._end()
        module = None if chosen is None else without_ddp(chosen[0].ref())
        if chosen is None or module is None:
            return
        seen, place, site = chosen
        takes = max(self._watch.lanes.step_ns(1), default=0)
        if takes > _LONG_NS and not self._watch.affords(takes):
            steps = self._watch.lanes.steps
            self._watch.at(2 * steps, self._open, is_once=True)
            self._watch.at(2 * steps + 1, self._close, is_once=True)
            return
        sees = sees_ahead(self._torch, module, place)
        if sees is not None and not any(item.site == site for item in self.found):
            length, at = int(place.tokens.shape[1]), place.at
            ahead = SeenAhead(seen.facts.kind, site, at, length, place.targets, *sees)
            self.found.append(ahead)

    def _end(self) -> None:
        self._later.close()
        while self._handles:
            self._handles.pop().remove()
        self._begin()
