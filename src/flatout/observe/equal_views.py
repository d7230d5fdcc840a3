"""Views of the same images that should differ by augmentation, but are bitwise equal.

Trained models are hooked in four steps of each training. A model is checked if a step calls it
twice, or once with both views in the halves of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flatout.hooks import after_forward, is_anything_compiled
from flatout.observe.models import SeenModel
from flatout.observe.observation import EqualViews
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Steps between which models are hooked, from _FROM to _UNTIL; each of these steps must have equal
# views.
_FROM, _UNTIL = AFTER_STEPS, AFTER_STEPS + 4
# _PICTURES: number of dimensions of a batch of images; _VALUES: minimum number of different numbers
# of an image.
_PICTURES, _VALUES = 4, 16
# _CALLS: maximum number of calls of a step that are compared; _NEAR: largest relative difference of
# the outputs, for rounding.
_CALLS, _NEAR = 4, 1e-5


class Views:
    """Inspection of models that are called with images."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._looks: list[_Look] = []
        self.found: list[EqualViews] = []
        watch.at_each(_FROM, self._open)
        watch.at_each(_UNTIL, self._close)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._close()
        self.found.clear()

    def _open(self) -> None:
        if is_anything_compiled():
            return  # hooks would make torch.compile compile again
        for seen in self._watch.models:
            module = seen.ref()
            plain = not (seen.facts.is_told or isinstance(module, self._torch.jit.ScriptModule))
            gets_pictures = any(len(shape) == _PICTURES for shape, _ in seen.shapes)
            if module is not None and plain and seen.is_stepped and gets_pictures:
                self._looks.append(_Look(self._torch, self._watch, seen))

    def _close(self) -> None:
        while self._looks:
            found = self._looks.pop().end()
            if found is not None:
                self.found.append(found)


class _Look:
    """Hook on one model, and its findings."""

    def __init__(self, torch: Any, watch: Watch, seen: SeenModel) -> None:
        self._torch, self._watch, self._seen = torch, watch, seen
        self._calls: list[tuple[Any, Any]] = []
        self._step = -1
        self._equal: set[int] = set()  # steps with equal views
        self._samples = 0
        self._is_batch = False
        self._site: Any = None
        module: Any = seen.ref()
        self._handle = after_forward(module, self._gives, with_kwargs=True)

    def _gives(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._watch.lanes.steps != self._step:
            self._step = self._watch.lanes.steps
            self._calls.clear()
        if len(args) != 1 or kwargs or not self._is_view(args[0]):
            return
        given, first = args[0].detach(), _first_of(self._torch, output)
        if first is None or not first.requires_grad or len(first) != len(given):
            return
        first = first.detach()
        half = len(given) // 2
        pairs = [(given[:half], first[:half])] if len(given) == 2 * half else []
        halves = [*_equal_to((given[half:], first[half:]), pairs)] if half > 1 else []
        others = [*_equal_to((given, first), self._calls)]
        if halves or others:
            self._equal.add(self._step)
            self._samples = half if halves else len(given)
            self._is_batch = bool(halves)
            self._site = self._site or here(1)
        if len(self._calls) < _CALLS:
            self._calls.append((given, first))

    def _is_view(self, given: Any) -> bool:
        if not self._torch.is_tensor(given) or given.dim() != _PICTURES or given.requires_grad:
            return False
        some = given.detach()[0].reshape(-1)[:1024]
        return len(given) > 1 and len(self._torch.unique(some)) >= _VALUES

    def end(self) -> EqualViews | None:
        self._handle.remove()
        self._calls.clear()
        if len(self._equal) < _UNTIL - _FROM:
            return None
        kind = self._seen.facts.kind
        return EqualViews(kind, self._site, self._samples, len(self._equal), self._is_batch)


def _equal_to(view: tuple[Any, Any], others: list[tuple[Any, Any]]) -> Iterator[int]:
    given, output = view
    for place, (before, gave) in enumerate(others):
        is_own = before.data_ptr() != given.data_ptr()
        if is_own and before.shape == given.shape and bool((before == given).all()):
            apart = (gave - output).abs().max() if gave.shape == output.shape else None
            if apart is not None and bool(apart <= _NEAR * output.abs().max()):
                yield place


def _first_of(torch: Any, output: Any) -> Any:
    while isinstance(output, (list, tuple)) and output:
        output = output[0]
    return output if torch.is_tensor(output) and output.dim() > 1 else None
