"""Held-out nodes of a graph that enter the loss, since no mask is applied to the loss.

A graph model gets all nodes at once, and gives a score for each. Only the loss selects the training
nodes, by a mask or by node indices. The script has masks or indices for testing, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from flatout.observe.graph_nodes import nearest_nodes
from flatout.observe.observation import HeldOutNodes
from flatout.observe.samples import is_in_memory
from flatout.observe.saved import saved_number
from flatout.observe.sites import here
from flatout.observe.tables import named_here
from flatout.observe.watch import Watch

# _STEPS: first steps of each training that are inspected; _NODES: maximum number of nodes of a
# loss's graph.
_STEPS, _NODES = 2, 64
_NLL = "NllLossBackward0"
_TRAINING, _HELD_OUT = "train", ("test", "val", "eval", "held")
# Attributes of a graph object, of any class.
_MASKS = ("train_mask", "val_mask", "test_mask")


class NodeLosses:
    """Inspection of the targets of the first losses.

    Attributes:
        found: a finding for each line.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self.found: list[HeldOutNodes] = []
        watch.before_backward.append(self._look)
        watch.on_renewal.append(self.found.clear)

    def _look(self, tensors: Any) -> None:
        if self._watch.lanes.steps >= self._watch.began + _STEPS:
            return
        root = tensors if self._torch.is_tensor(tensors) else next(iter(tensors))
        for node in nearest_nodes(root.grad_fn, _NODES) if root.grad_fn is not None else ():
            # An unreduced loss may be multiplied by a mask.
            if node.name() == _NLL and node._saved_reduction:
                try:
                    target = node._saved_target
                except RuntimeError:  # the saved tensor was freed
                    return
                self._compare(target, saved_number(node, "ignore_index"))
                return

    def _compare(self, target: Any, ignored: int) -> None:
        site = here(3)
        if site is None or any(item.site == site for item in self.found):
            return
        chosen = dict(self._chosen(len(target)))
        trains = [name for name in chosen if _TRAINING in name.lower()]
        for word in _HELD_OUT if trains else ():
            for name, rows in chosen.items():
                if word in name.lower() and name not in trains:
                    in_loss = int((target[rows.to(target.device)] != ignored).sum())
                    if in_loss:
                        self.found.append(HeldOutNodes(name, in_loss, len(target), site))
                        return

    def _chosen(self, nodes: int) -> Iterator[tuple[str, Any]]:
        torch = self._torch
        for name, given in _with_masks(named_here()):
            if not is_in_memory(given) or given.ndim != 1 or len(given) > nodes:
                continue
            value = given if torch.is_tensor(given) else torch.tensor(given)
            if value.dtype == torch.bool:
                is_chosen = len(value) == nodes and 0 < int(value.sum()) < nodes
            else:  # node indices must be unique and in range
                is_chosen = value.dtype == torch.int64 and 1 < len(value) < nodes
                is_chosen = is_chosen and int(value.min()) >= 0 and int(value.max()) < nodes
                is_chosen = is_chosen and len(torch.unique(value)) == len(value)
            if is_chosen:
                yield name, value


def _with_masks(named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in named:
        yield name, value
        if not isinstance(value, (type, ModuleType)) and hasattr(value, _MASKS[0]):
            yield from ((f"{name}.{mask}", getattr(value, mask, None)) for mask in _MASKS)
