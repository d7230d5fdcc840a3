"""Confusion matrix of classes: counted batch by batch, and shown as a table or a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.data import Batch
from flatout.errors import ModelError
from flatout.plotting import figure_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Maximum number of classes of a matrix.
_MOST = 1000
# Maximum number of classes for which the picture has a number in each field.
_NUMBERED = 20

Matrix = list[list[int]]


class ConfusionCount:
    """Counts of samples by true class (row) and predicted class (column).

    The metric's value is the mean recall of the classes that have samples.

    Attributes:
        latest: the counts of all ranks when they were last computed; None before.
    """

    is_of_samples = True

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None
        self.latest: Matrix | None = None

    def update(self, output: Any, batch: Batch) -> None:
        """Count a batch, as `count` does."""
        self.count(output, batch.targets)

    def count(self, output: Any, target: Any) -> None:
        """Count samples from scores of shape (samples, classes).

        Targets are class numbers, or class probabilities. Targets of -100 do not count.
        """
        if not torch.is_tensor(output) or not torch.is_tensor(target) or output.dim() != 2:
            raise ModelError(
                "confusion counts scores of shape (samples, classes) for one class a sample",
                do="leave it out of the metrics, or use torchmetrics",
            )
        classes = output.shape[1]
        if not 2 <= classes <= _MOST:
            raise ModelError(f"confusion is for 2 to {_MOST} classes, found {classes}")
        true = target.argmax(1) if target.shape == output.shape else target.reshape(-1).long()
        if self._counts is None:
            self._counts = torch.zeros(classes**2 + 1, dtype=torch.int64, device=output.device)
        # Samples that do not count are added to the last bin, so that the host need not wait for
        # the device.
        at = (true * classes + output.argmax(1)).where((true >= 0) & (true < classes), classes**2)
        self._counts.index_add_(0, at, torch.ones_like(at))

    def compute(self, states: Sequence[Any] | None = None) -> float:
        """Return the mean recall, of its own counts or over `states`; NaN without any."""
        result = [self._counts] if states is None else list(states)
        counts = [count.cpu() for count in result if count is not None]
        if not counts:
            self.latest = None
            return math.nan
        total = torch.stack(counts).sum(0)[:-1]
        side = math.isqrt(len(total))
        self.latest = total.reshape(side, side).tolist()
        recalls = [value for value in recall_of(self.latest) if not math.isnan(value)]
        return sum(recalls) / len(recalls) if recalls else math.nan

    def reset(self) -> None:
        """Forget all batches."""
        self._counts = None

    def state_dict(self) -> Any:
        """Return the counts."""
        return None if self._counts is None else self._counts.clone()

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of `state_dict`."""
        self._counts = None if state is None else state.clone()


def recall_of(matrix: Matrix) -> list[float]:
    """Return the recall of each class; NaN for a class without samples."""
    return [_share(row[at], sum(row)) for at, row in enumerate(matrix)]


def precision_of(matrix: Matrix) -> list[float]:
    """Return the precision of each class; NaN for a class that was never predicted."""
    return [_share(matrix[at][at], sum(row[at] for row in matrix)) for at in range(len(matrix))]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def names_of(matrix: Matrix, classes: Sequence[str]) -> list[str]:
    """Return the names of the rows: names of the classes, or their numbers."""
    return [classes[at] if at < len(classes) else str(at) for at in range(len(matrix))]


def table(matrix: Matrix, classes: Sequence[str]) -> str:
    """Return a table of samples, recall, precision and the most frequent wrong class by class."""
    names = names_of(matrix, classes)
    width = max(5, *map(len, names))
    lines = [f"{'class':<{width}}  samples  recall  precision  mostly taken for"]
    for at, (recall, precision) in enumerate(
        zip(recall_of(matrix), precision_of(matrix), strict=True)
    ):
        others = [0 if column == at else count for column, count in enumerate(matrix[at])]
        most = max(others)
        taken = f"{names[others.index(most)]} ({most:,})" if most else ""
        shares = f"{_percent(recall):>6}  {_percent(precision):>9}"
        line = f"{names[at]:<{width}}  {sum(matrix[at]):>7,}  {shares}"
        lines.append(f"{line}  {taken}".rstrip())
    return "\n".join(lines)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def draw_confusion(matrix: Matrix, classes: Sequence[str], path: str | Path) -> Figure:
    """Draw the matrix into an image file: true classes down, predicted across, shares by row."""
    figure_of = figure_class()
    names = names_of(matrix, classes)
    side = min(12.0, 3.5 + 0.5 * len(names))
    figure = figure_of(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = [[count / max(1, sum(row)) for count in row] for row in matrix]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, label="share of the true class", shrink=0.8)
    axes.set(xlabel="predicted", ylabel="true", title="confusion of the latest validation")
    if len(names) <= _NUMBERED:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.set_yticks(range(len(names)), names)
        for row, counts in enumerate(matrix):
            for column, count in enumerate(counts):
                color = "white" if shares[row][column] > 0.5 else "black"
                axes.text(column, row, f"{count:,}", ha="center", va="center", color=color)
    figure.savefig(path, dpi=120)
    return figure
