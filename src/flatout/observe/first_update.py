"""Relative change of the weights in the first step."""

from __future__ import annotations

import sys
from statistics import median
from typing import Any
from weakref import ref

from flatout.observe.model_facts import local, some_of
from flatout.observe.watch import Watch

# Maximum number of elements of each matrix that are compared.
_SAMPLE = 1024
# Smallest root mean square of a matrix. Matrices below start near zero on purpose, as in an
# adapter.
_LEAST = 1e-3
# Minimum number of an optimizer's matrices from which a median is reported.
_MATRICES = 3
# Step by which each of several optimizers has stepped, even if some step more often.
_LAST = 8


class FirstUpdate:
    """Comparison of the models' matrices before and after the first step."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._renew()
        watch.with_gradients.append(self._keep)
        for step in range(1, _LAST + 1):
            watch.at_each(step, self._look)
        watch.on_renewal.append(self._renew)
        watch.on_training.append(self._renew)

    def _renew(self) -> None:
        self._before: dict[int, tuple[ref[Any], Any]] = {}

    def _keep(self) -> None:
        for watched in self._watch.models:
            model = watched.ref()
            for tensor in () if model is None else model.parameters():
                # Keras keeps meta tensors of layers whose shapes it has inferred.
                has_numbers = tensor.dim() >= 2 and not tensor.is_meta
                if has_numbers and tensor.requires_grad and id(tensor) not in self._before:
                    self._before[id(tensor)] = ref(tensor), _sample(tensor)

    def _look(self) -> None:
        for optimizer in self._watch.stepping():
            if optimizer.facts.first_change is None:
                changes = [change for item in optimizer.tensors() if (change := self._change(item))]
                if len(changes) >= _MATRICES:
                    optimizer.facts.first_change = len(changes), median(changes)
        if self._watch.lanes.steps - self._watch.began >= _LAST:
            self._before.clear()

    def _change(self, tensor: Any) -> float:
        kept = self._before.get(id(tensor))
        if kept is None or kept[0]() is not tensor:
            return 0.0
        before = kept[1]
        size = _rms(before)
        return _rms(_sample(tensor) - before) / size if size > _LEAST else 0.0


def _rms(values: Any) -> float:
    return float(values.square().mean().sqrt())


def _sample(tensor: Any) -> Any:
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        return some_of(local(tensor.detach()), _SAMPLE).float().cpu().clone()
