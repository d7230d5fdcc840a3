"""Class weights, applied as weights of the samples of each class."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from flatout.data import Batch
from flatout.errors import ModelError
from flatout.train.losses.class_counts import classes_of
from flatout.train.losses.losses import Loss


class ClassWeight:
    """Multiplies the weight of each sample by the weight of its class."""

    def __init__(self, given: Mapping[int, float], loss: Loss) -> None:
        if not isinstance(given, Mapping) or not given:
            raise ModelError(
                f"class_weight maps class numbers to weights, found a {type(given).__name__}",
                do="write class_weight={0: 1.0, 1: 5.0}; of a list: dict(enumerate(weights))",
            )
        for number, weight in given.items():
            is_class = isinstance(number, numbers.Integral) and number >= 0
            if not is_class or not _is_weight(weight):
                raise ModelError(
                    f"class_weight maps class numbers from 0 on to weights from 0 on, found "
                    f"{number!r}: {weight!r}"
                )
        self._loss = loss
        self._table = torch.ones(int(max(given)) + 1, dtype=torch.float64)
        for number, weight in given.items():
            self._table[int(number)] = float(weight)

    @property
    def words(self) -> str:
        """Weights by class number, for messages."""
        return ", ".join(f"{number}: {w:g}" for number, w in enumerate(self._table.tolist()))

    def check(self, output: object) -> None:
        """Refuse a weight for a class that the model does not have."""
        is_binary = self._loss.name == "binary_cross_entropy"
        if not isinstance(output, torch.Tensor) or not (is_binary or output.dim() > 1):
            return
        if self._loss.ignore_index is None and not is_binary:
            return
        classes, largest = 2 if is_binary else output.shape[1], len(self._table) - 1
        if largest >= classes:
            raise ModelError(
                f"class_weight has a weight for class {largest}, and the model's classes are "
                f"0..{classes - 1}",
                do="name classes by the numbers that the targets have",
            )

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with each sample's weight multiplied by its class's weight."""
        classes = classes_of(batch.targets, self._loss)
        if self._table.device != classes.device:
            self._table = self._table.to(classes.device)
        known = (classes >= 0) & (classes < len(self._table))
        weight = self._table[classes.where(known, 0)].where(known, 1.0)
        return batch._replace(weight=weight if batch.weight is None else batch.weight * weight)


def _is_weight(value: Any) -> bool:
    return isinstance(value, numbers.Real) and 0 <= float(value) < math.inf
