"""Labels of the training batches, found as the tensor that enters the loss, whatever its name.

The labels of the first steps are recorded, and compared with the columns that the script holds. A
column was read in sorted order if the labels are its beginning and the rows of each class are
consecutive. If all batches had a single class and no column explains it, later batches are
inspected at growing intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flatout.observe.graph_nodes import first_child, nearest_nodes
from flatout.observe.label_columns import (
    Lies,
    column_of,
    columns_of_dataset,
    columns_of_names,
)
from flatout.observe.later_backwards import LaterBackwards
from flatout.observe.observation import InLoss, Site
from flatout.observe.quick import AFTER_STEPS
from flatout.observe.sites import here
from flatout.observe.tables import named_here
from flatout.observe.watch import Watch

# _FROM: step after which the hook for the first steps is gone; _UNTIL: step of the decision.
_FROM, _UNTIL = AFTER_STEPS, AFTER_STEPS + 4
# _NODES: maximum number of graph nodes that are searched from the loss on; _LOSSES: maximum number
# of losses recorded.
_NODES, _LOSSES = 256, 8
_OF_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")
_OF_TWO = ("BinaryCrossEntropyWithLogitsBackward0", "BinaryCrossEntropyBackward0")
# _LEAST: minimum number of labels in a batch for a check of their order; _BATCHES: minimum number
# of such batches.
_LEAST, _BATCHES = 8, 6
# _PURE: share of batches with a single class from which on later batches are inspected; _LATER:
# factor from one inspected step to the next.
_PURE, _LATER = 0.75, 1.3
# Largest share of batches whose class differs from the batch before, for labels of 0 and 1. A GAN
# that trains on real and generated halves changes it more often.
_CHANGES = 1 / 3
# _STRIDES: maximum number of steps between successive windows of a series; _ASKED: number of
# training steps that are checked.
_STRIDES, _ASKED = 64, 3


@dataclass
class _Seen:
    """Labels that entered a loss.

    Attributes:
        site: the line of the backward pass.
        classes: number of possible classes.
        is_of_two: whether the labels were 0 and 1 for a binary loss, instead of class indices.
        batches, of_one: number of inspected batches, and of those with a single class.
        alone: the classes of the batches with a single class.
        changes: number of times that the class differed between successive batches with a single
            class.
        first: the labels of the first batches, concatenated.
        lies: the column that begins with these labels.
    """

    site: Site | None
    classes: int
    is_of_two: bool
    batches: int = 0
    of_one: int = 0
    alone: list[int] = field(default_factory=list)
    changes: int = 0
    steps: int = 0
    first: list[int] = field(default_factory=list)
    batch_size: int = 0
    lies: Lies | None = None

    def add(self, labels: list[int], step: int) -> None:
        self.batches += 1
        self.steps = step
        self.batch_size = self.batch_size or len(labels)
        if step <= _UNTIL:
            self.first += labels
        if len(set(labels)) > 1:
            return
        self.of_one += 1
        if labels[0] in self.alone[-1:]:
            return
        self.changes += len(self.alone) > 0
        self.alone = [*(label for label in self.alone if label != labels[0]), labels[0]]

    @property
    def is_open(self) -> bool:
        return len(self.alone) == 1 and self.of_one >= max(_BATCHES, _PURE * self.batches)

    def result(self, is_half: bool) -> InLoss:
        of_one, alone = self.of_one, sorted(self.alone)
        if self.is_of_two and (is_half or self.changes > _CHANGES * self.of_one):
            of_one, alone = 0, []
        detail = {"batches": self.batches, "of_one": of_one, "alone": alone}
        detail["classes"] = self.classes
        if self.lies is not None:
            detail["lies"] = list(self.lies)
        return InLoss("labels", self.site, self.batches, self.steps, detail)


class Labels:
    """Inspection of the labels of some batches."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._later = LaterBackwards(torch, watch, self._look)
        self._renew()
        watch.before_backward.append(self._look)
        watch.on_batch.append(self._look_at_input)
        watch.on_renewal.append(self._renew)
        watch.at(_FROM, self._later.open)
        watch.at(_UNTIL, self._decide)

    def _renew(self) -> None:
        self._seen: dict[tuple[str, int, str], _Seen] = {}
        self._at = (-1, 0)  # a step, and the index of its latest loss
        # By line: step and class of the latest batch with a single class. `_halves`: lines where
        # one step has two such losses of different classes, such as for real and generated samples.
        self._latest: dict[str, tuple[int, int]] = {}
        self._halves: set[str] = set()
        self._is_series = False
        self._later.close()

    def _look(self, tensors: Any) -> None:
        step, before = self._watch.lanes.steps, self._at
        self._at = (step, before[1] + 1 if before[0] == step else 0)
        for root in [tensors] if isinstance(tensors, self._torch.Tensor) else list(tensors):
            try:
                found = root.grad_fn and _labels_under(root.grad_fn)
            except (RuntimeError, NotImplementedError):
                continue  # saved tensors were freed, or this node has none
            if not found:
                continue
            labels, classes, name = found
            site = here()
            key = str(site), self._at[1], name  # each loss of a GAN has its own labels
            if key not in self._seen and len(self._seen) >= _LOSSES:
                return
            seen = self._seen.setdefault(key, _Seen(site, classes, name in _OF_TWO))
            seen.add(labels, step + 1)
            if len(set(labels)) == 1:
                if seen.is_of_two and self._latest.get(key[0]) == (step, 1 - labels[0]):
                    self._halves.add(key[0])
                self._latest[key[0]] = step, labels[0]
            return

    def _look_at_input(self, model: Any, batch: Any, is_trained: bool) -> None:
        is_asked = is_trained and not self._is_series and self._watch.lanes.steps < _ASKED
        if is_asked and self._torch.is_tensor(batch):
            self._is_series = _are_windows(batch)

    def _decide(self) -> None:
        self._later.close()
        if self._is_series or not self._seen:
            return
        for seen in self._seen.values():
            seen.lies = column_of(seen.first, seen.batch_size, seen.classes, self._columns())
        self._await()

    def _columns(self) -> Iterator[tuple[str, Any]]:
        loader = self._watch.lanes.loader
        if loader is None:
            yield from columns_of_names(named_here())
        elif loader.facts.label_runs is None and loader.facts.is_in_order:
            yield from columns_of_dataset(getattr(loader.ref(), "dataset", None))

    def _await(self) -> None:
        self._later.close()
        awaited = (
            seen.is_open and seen.lies is None and not (seen.is_of_two and line in self._halves)
            for (line, *_), seen in self._seen.items()
        )
        if not any(awaited):
            return
        step = self._watch.lanes.steps
        later = max(step + 1, int(_LATER * step))
        self._watch.at(later, self._later.open, is_once=True)
        self._watch.at(later + 1, self._await, is_once=True)

    def results(self) -> list[InLoss]:
        """Return a finding for each loss, with the most batches of a single class first."""
        facts = [seen.result(line in self._halves) for (line, *_), seen in self._seen.items()]
        return sorted(facts, key=lambda fact: -len(fact.detail["alone"]))


def _labels_under(root: Any) -> tuple[list[int], int, str] | None:
    for node in nearest_nodes(root, _NODES):
        name = node.name()
        labels = None
        if name in _OF_CLASSES:
            labels, classes = node._saved_target, int(node._saved_self.shape[1])
        elif name in _OF_TWO:
            labels, classes = _of_two(node._saved_target), 2
        elif name == "MulBackward0" and _is_log_softmax(node):
            labels, classes = _of_one_hot(node._saved_other)
        if labels is not None:
            return _as_list(labels, classes, name)
    return None


def _as_list(labels: Any, classes: int, name: str) -> tuple[list[int], int, str] | None:
    if labels.dim() != 1 or labels.is_floating_point():
        return None
    values = labels[labels >= 0].tolist()
    return (values, classes, name) if len(values) >= _LEAST else None


def _of_two(target: Any) -> Any:
    flat = target.reshape(-1)
    if target.dim() > 2 or flat.numel() != len(target) or not ((flat == 0) | (flat == 1)).all():
        return None
    return flat.long()


def _is_log_softmax(node: Any) -> bool:
    child = first_child(node)
    return child is not None and child.name() == "LogSoftmaxBackward0"


def _of_one_hot(target: Any) -> tuple[Any, int]:
    if target is None or target.dim() != 2:
        return None, 0
    is_one = (target == 1).sum(1) == 1
    is_hot = bool(is_one.all()) and bool(((target == 0) | (target == 1)).all())
    return (target.argmax(1) if is_hot else None), int(target.shape[1])


def _are_windows(batch: Any) -> bool:
    if batch.dim() not in (2, 3) or len(batch) < 3 or batch.device.type != "cpu":
        return False
    rows = batch[:3].detach()
    for dim in range(1, rows.dim()):
        turned = rows.transpose(1, dim)
        length = turned.shape[1]
        if length < _LEAST or bool((turned[0, 1:] == turned[0, :-1]).all()):
            continue
        for stride in range(1, min(_STRIDES, length // 2 + 1)):
            if bool((turned[:2, stride:] == turned[1:, :-stride]).all()):
                return True
    return False
