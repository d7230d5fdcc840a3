"""Numbers of samples of each class in the training data, and weights that balance them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from flatout.data import Pipeline, Source, epoch_targets
from flatout.errors import DataError, ModelError
from flatout.train.losses.losses import Loss
from flatout.words import counted, rounded
from flatout.world import World

Counts: TypeAlias = dict[int, int]
# Maximum number of classes that a message lists one by one.
_TOLD = 8


def classes_of(targets: Any, loss: Loss) -> torch.Tensor:
    """Return the class of each sample, int64 of shape (samples,), as the loss reads targets."""
    if isinstance(targets, torch.Tensor):
        takes_labels = loss.ignore_index is not None
        if takes_labels and targets.is_floating_point() and targets.dim() == 2:
            return targets.argmax(1)
        labels = targets[:, 0] if targets.dim() == 2 and targets.shape[1] == 1 else targets
        if labels.dim() == 1:
            return (labels.round() if labels.is_floating_point() else labels).long()
    result = f"shape {tuple(targets.shape)}" if torch.is_tensor(targets) else f"{type(targets)}"
    raise ModelError(
        f"class_weight needs one class per sample, found targets of {result}",
        do="weigh the classes in the loss, as torch.nn.CrossEntropyLoss(weight=...) does",
    )


def counted_classes(targets: Any, loss: Loss) -> torch.Tensor:
    """Return the class of each sample; -1 for samples that the loss ignores."""
    classes = classes_of(targets, loss)
    if loss.ignore_index is not None:
        classes = classes.masked_fill(classes == loss.ignore_index, -1)
    return classes


def counts_of(
    source: Source, classes: Callable[[torch.Tensor], torch.Tensor], world: World
) -> Counts:
    """Return the number of samples of each class in an epoch, over all ranks."""
    targets = epoch_targets(source)
    own = count(classes(torch.tensor(targets)))
    if not (isinstance(source, Pipeline) and source.has_own_rows):
        return own
    total: Counter[int] = Counter()
    for of_rank in world.gather([list(pair) for pair in own.items()], "counts of classes"):
        total.update(dict(of_rank))
    return dict(sorted(total.items()))


def count(classes: torch.Tensor) -> Counts:
    """Return the number of samples of each class; negative numbers are no classes."""
    numbers, counts = torch.unique(classes[classes >= 0], return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def is_balanced(given: Any) -> bool:
    """Return whether the weights are to be counted from the data."""
    return isinstance(given, str) and given == "balanced"


def balanced_weights(counts: Counts) -> dict[int, float]:
    """Return weights that give all present classes equal influence: n / (classes * count).

    They are those of scikit-learn's `class_weight="balanced"`; their mean over all samples is 1.
    """
    if not counts:
        raise DataError("class_weight='balanced' found no sample that has a class")
    total = sum(counts.values())
    return {number: total / (len(counts) * count) for number, count in counts.items()}


def balanced_words(counts: Counts, names: Sequence[str] | None) -> str:
    """Return a line such as "class_weight balanced: cat 0.62 (812 samples), dog 2.6 (...)"."""
    weights = balanced_weights(counts)
    words = [
        f"{names[number] if names and number < len(names) else number} {rounded(weight)} "
        f"({counted(counts[number], 'sample')})"
        for number, weight in list(weights.items())[:_TOLD]
    ]
    more = f" and {len(counts) - _TOLD:,} more" if len(counts) > _TOLD else ""
    return f"class_weight balanced: {', '.join(words)}{more}"
