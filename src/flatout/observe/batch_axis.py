"""Recurrent layers and attention that run over the samples of a batch: `batch_first` is missing."""

from __future__ import annotations

from typing import Any

from flatout.hooks import PassingHook, is_anything_compiled
from flatout.observe.observation import OverBatch
from flatout.observe.sites import here
from flatout.observe.watch import Watch

_FROM, _UNTIL = 2, 5


class BatchAxis:
    """Looks in a few steps at what layers get that take the sequence first.

    Only a batch of samples that a DataLoader shuffles: these have no order among them.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._handles: list[Any] = []
        self._renew()
        watch.at(_FROM, self._open)
        watch.at(_UNTIL, self._end)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._found: dict[int, OverBatch] = {}
        self._calls: dict[int, int] = {}
        self._end()

    @property
    def layers(self) -> list[OverBatch]:
        """Those that got the samples as their sequence in each of their calls."""
        return [fact for key, fact in self._found.items() if fact.count == self._calls[key]]

    def _open(self) -> None:
        if is_anything_compiled():
            return
        nn = self._torch.nn
        for model in self._watch.models:
            module = model.ref()
            for inner in () if module is None or not model.is_stepped else module.modules():
                if isinstance(inner, (nn.RNNBase, nn.MultiheadAttention)) and not inner.batch_first:
                    hook = PassingHook(self._called)
                    self._handles.append(inner.register_forward_pre_hook(hook, with_kwargs=True))

    def _called(self, layer: Any, args: Any, kwargs: Any) -> None:
        if not (layer.training and self._torch.is_grad_enabled()):
            return
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        key = id(layer)
        self._calls[key] = self._calls.get(key, 0) + 1
        if not self._torch.is_tensor(given) or given.dim() != 3 or not self._is_batch(given.shape):
            return
        fact = self._found.get(key)
        if fact is None:
            fact = self._found[key] = OverBatch(type(layer).__name__, here(1))
            fact.shape = [int(size) for size in given.shape]
        fact.count += 1

    def _is_batch(self, shape: Any) -> bool:
        """Whether the first of these sizes is that of the loader's batch, and the second not."""
        loader = self._watch.lanes.loader
        if loader is None:
            return False
        facts = loader.facts
        is_shuffled = bool(facts.shuffles) and not facts.gives_batches
        rows = facts.batch_size or 1
        return is_shuffled and shape[0] == rows > 1 and shape[1] not in (1, rows)

    def _end(self) -> None:
        while self._handles:
            self._handles.pop().remove()
