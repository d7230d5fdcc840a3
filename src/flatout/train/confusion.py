"""Which classes are taken for which: counted batch by batch, and shown as a table or a picture."""

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

# A matrix of more classes than these is for no one to look at.
_MOST = 1000
# Of so many classes the picture has a number in each field.
_NUMBERED = 20

Matrix = list[list[int]]


class ConfusionCount:
    """Counts of samples by true class (row) and predicted class (column); its value is the mean
    recall of the classes that there are.

    Attributes:
        latest: the counts when they were last computed, of all ranks; None before.
    """

    is_of_samples = True

    def __init__(self) -> None:
        self._counts: torch.Tensor | None = None
        self.latest: Matrix | None = None

    def update(self, output: Any, batch: Batch) -> None:
        """Count a batch, as `count` does."""
        self.count(output, batch.targets)

    def count(self, output: Any, target: Any) -> None:
        """Count samples: scores (samples, classes), and class numbers, -100 of which do not count,
        or class probabilities."""
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
        # What does not count goes into the last place, so that nothing is read from the device.
        at = (true * classes + output.argmax(1)).where((true >= 0) & (true < classes), classes**2)
        self._counts.index_add_(0, at, torch.ones_like(at))

    def compute(self, states: Sequence[Any] | None = None) -> float:
        """The mean recall, of its own counts or over what the states hold; NaN without any."""
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
        """The counts."""
        return None if self._counts is None else self._counts.clone()

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        self._counts = None if state is None else state.clone()


def recall_of(matrix: Matrix) -> list[float]:
    """Which share of each class was recognized; NaN of one without samples."""
    return [_share(row[at], sum(row)) for at, row in enumerate(matrix)]


def precision_of(matrix: Matrix) -> list[float]:
    """Which share of what was taken for each class is of it; NaN where nothing was."""
    return [_share(matrix[at][at], sum(row[at] for row in matrix)) for at in range(len(matrix))]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def names_of(matrix: Matrix, classes: Sequence[str]) -> list[str]:
    """Names of the rows: those of the classes, or their numbers."""
    return [classes[at] if at < len(classes) else str(at) for at in range(len(matrix))]


def table(matrix: Matrix, classes: Sequence[str]) -> str:
    """Samples, recall and precision of each class, and what it is mostly taken for else."""
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
    """Draw it into an image file: true classes down, predicted ones across, shares of each row."""
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
