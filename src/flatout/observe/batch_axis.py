"""Recurrent layers and attention that run over the samples of a batch: `batch_first` is missing."""

from __future__ import annotations

from math import prod
from typing import Any

from flatout.hooks import before_forward, is_anything_compiled
from flatout.observe.graph_nodes import nearest_nodes
from flatout.observe.observation import OverBatch
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Steps of each training between which layers are hooked: _FROM and _UNTIL.
_FROM, _UNTIL = 2, 5
_NLL = ("NllLossBackward0", "NllLoss2DBackward0")
# _NODES: maximum number of graph nodes that are searched; _PLACES: minimum number of tokens of a
# text (a row); _KINDS: minimum number of different tokens of a batch of texts.
_NODES, _PLACES, _KINDS = 64, 4, 4


class BatchAxis:
    """Record of the inputs of sequence-first layers, from a few steps of each training.

    Only two kinds of batches are conclusive. The samples of a batch that a DataLoader shuffles have
    no order. A batch of texts whose targets are the texts shifted by one token reveals which
    dimension has the tokens.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._handles: list[Any] = []
        self._renew()
        watch.at_each(_FROM, self._open)
        watch.at_each(_UNTIL, self._end)
        watch.on_batch.append(self._is_given)
        watch.before_backward.append(self._look)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._found: dict[int, OverBatch] = {}
        self._calls: dict[int, int] = {}
        self._shapes: dict[int, list[tuple[int, ...]]] = {}  # by layer; unshuffled inputs only
        self._texts: set[tuple[int, ...]] = set()  # shapes of batches of texts, samples first
        self._batch: Any = None
        self._end()

    @property
    def layers(self) -> list[OverBatch]:
        """Layers that got the samples as their sequence in each of their calls."""
        return [fact for key, fact in self._found.items() if self._is_sure(key, fact)]

    def _is_sure(self, key: int, fact: OverBatch) -> bool:
        shapes = self._shapes.get(key, [])
        fact.by_targets = not fact.count
        return fact.count + len(shapes) == self._calls[key] and self._texts.issuperset(shapes)

    def _open(self) -> None:
        if is_anything_compiled():
            return
        nn = self._torch.nn
        for model in self._watch.models:
            module = model.ref()
            for inner in () if module is None or not model.is_stepped else module.modules():
                if isinstance(inner, (nn.RNNBase, nn.MultiheadAttention)) and not inner.batch_first:
                    self._handles.append(before_forward(inner, self._called, with_kwargs=True))

    def _called(self, layer: Any, args: Any, kwargs: Any) -> None:
        if not (layer.training and self._torch.is_grad_enabled()):
            return
        given = args[0] if args else kwargs.get("input", kwargs.get("query"))
        key = id(layer)
        self._calls[key] = self._calls.get(key, 0) + 1
        if not self._torch.is_tensor(given) or given.dim() != 3:
            return
        fact = self._found.get(key)
        if fact is None:
            fact = self._found[key] = OverBatch(type(layer).__name__, here(1))
            fact.shape = [int(size) for size in given.shape]
        if leads_with_samples(self._watch, given.shape[:2]):
            fact.count += 1
        else:
            self._shapes.setdefault(key, []).append(tuple(given.shape[:2]))

    def _is_given(self, model: Any, batch: Any, is_trained: bool) -> None:
        if is_trained and self._handles:
            self._batch = batch

    def _look(self, tensors: Any) -> None:
        batch, self._batch = self._batch, None
        if not self._handles or not self._torch.is_tensor(batch) or batch.dim() != 2:
            return
        if batch.is_floating_point() or batch.is_complex() or batch.shape[0] == batch.shape[1]:
            return
        root = tensors if self._torch.is_tensor(tensors) else next(iter(tensors))
        target = _classes_under(root.grad_fn) if root.grad_fn is not None else None
        if target is not None and target.numel() == batch.numel() and self._goes_on(batch, target):
            self._texts.add(tuple(batch.shape))

    def _goes_on(self, batch: Any, target: Any) -> bool:
        if batch.shape[1] < _PLACES or len(self._torch.unique(batch)) < _KINDS:
            return False
        target = target.detach().reshape(batch.shape)
        return bool(self._torch.equal(target[:, :-1].to(batch.dtype), batch[:, 1:]))

    def _end(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._batch = None


def leads_with_samples(watch: Watch, shape: Any) -> bool:
    """Return whether only the first dimension has the size of a loader's shuffled batch."""
    loader = watch.lanes.loader
    if loader is None:
        return False
    facts = loader.facts
    is_shuffled = bool(facts.shuffles) and not facts.gives_batches
    rows = facts.batch_size or 1
    return is_shuffled and shape[0] == rows > 1 and prod(shape[1:]) > 1 and rows not in shape[1:]


def _classes_under(root: Any) -> Any:
    try:
        for node in nearest_nodes(root, _NODES):
            if node.name() in _NLL:
                return node._saved_target
    except (RuntimeError, NotImplementedError):
        pass  # saved tensors were freed, or this node has none
    return None
