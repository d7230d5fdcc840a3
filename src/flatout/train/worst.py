"""The samples that a model gets most wrong: those with the highest loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.data import Batch, Pipeline, Source
from flatout.errors import DataError, FlatoutError
from flatout.plotting import figure_class
from flatout.train import guard
from flatout.train.checks import explained
from flatout.train.evaluate import evaluating
from flatout.train.loop import Loop
from flatout.train.losses.sample_loss import SampleLoss
from flatout.train.ranks import part_of
from flatout.train.tables.tables import ids_checked
from flatout.words import rounded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flatout.train.objective import Objective

_COLUMNS = 5


@dataclass(frozen=True)
class WorstSample:
    """A sample with a high loss.

    Attributes:
        loss: loss of this sample alone, without sample weights.
        number: index of the sample in the data, or its position in the order of reading.
        where: file, line or image that the sample comes from; "" if the data do not name one.
        target: the sample's class by name if known, else by number; or its target value; None for
            larger targets.
        predicted: the model's prediction in the same form.
        probability: the model's probability for the predicted class; None without classes.
    """

    loss: float
    number: int
    where: str
    target: Any
    predicted: Any
    probability: float | None


class Worst(list[WorstSample]):
    """Samples with the highest loss, the highest first: a list with a table, data and a picture."""

    def __init__(self, samples: Sequence[WorstSample], images: Sequence[torch.Tensor | None]):
        super().__init__(samples)
        self._images = images

    def as_dict(self) -> list[dict[str, Any]]:
        """Return plain data, a dict for each sample."""
        return [asdict(sample) for sample in self]

    def __repr__(self) -> str:
        """Return a table with a line for each sample."""
        rows = [("loss", "target", "predicted", "sample")]
        for item in self:
            share = "" if item.probability is None else f" ({item.probability:.0%})"
            place = item.where or f"sample {item.number:,}"
            rows.append(
                (rounded(item.loss), _shown(item.target), _shown(item.predicted) + share, place)
            )
        widths = [max(len(row[at]) for row in rows) for at in range(3)]
        lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows]
        return "\n".join(lines)

    def plot(self, path: str | Path) -> Figure:
        """Draw the images into an image file, the highest loss first, with both classes."""
        samples = [
            (s, image) for s, image in zip(self, self._images, strict=True) if image is not None
        ]
        if not samples:
            raise FlatoutError(
                "these samples are no images", do="look at the table, or at `as_dict()`"
            )
        figure_of = figure_class()
        columns = min(_COLUMNS, len(samples))
        lines = math.ceil(len(samples) / columns)
        figure = figure_of(figsize=(2.4 * columns, 2.8 * lines), layout="constrained")
        fields = figure.subplots(lines, columns, squeeze=False).ravel()
        for field in fields:
            field.axis("off")
        for field, (sample, image) in zip(fields, samples, strict=False):
            pixels = _pixels(image)
            field.imshow(pixels, cmap="gray" if pixels.ndim == 2 else None)
            share = "" if sample.probability is None else f" {sample.probability:.0%}"
            title = f"{_shown(sample.target)}\nas {_shown(sample.predicted)}{share}"
            field.set_title(title, fontsize=9)
        figure.savefig(path, dpi=120)
        return figure


def worst(
    objective: Objective, loop: Loop, source: Source, n: int, classes: Sequence[str] | None
) -> Worst:
    """Return the `n` samples of a source with the highest loss, over all ranks."""
    loss = objective.sample_loss()
    guard.check_state(objective.model, "looking for the worst samples")
    loop.be_ready(objective.model)
    world, result = loop.world, 0
    worst_samples: list[tuple[WorstSample, torch.Tensor | None]] = []

    def take(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with ids_checked(objective.model, batch, source):
            output = objective.output(batch.inputs, loop)
        if batch.targets is None:
            raise DataError("the samples have no targets", do="give (x, y), or x and y")
        return loss.values(output, batch).cpu(), output.detach().float().cpu()

    with evaluating(objective.model), loop.autocast():
        for raw in part_of(source, world, loop.say, whole=loop.takes_whole_batches).batches(0, 0):
            batch = loop.ready(raw)
            with explained(objective.model, batch):
                parts = loop.evaluation.in_pieces(take, batch)
            if not raw.is_copy:
                values = torch.cat([part[0] for part in parts])[: raw.samples]
                outputs = torch.cat([part[1] for part in parts])
                rows = values.nan_to_num(math.inf).topk(min(n, len(values))).indices.tolist()
                describe = partial(_described, raw, values, outputs, loss, source, classes)
                new = [(describe(row, result + raw.start + row), _image(raw, row)) for row in rows]
                worst_samples = _worst_of([*worst_samples, *new], n)
            result += raw.whole or raw.size
    loop.tell_skipped(source)
    both = world.gather([(asdict(sample), image) for sample, image in worst_samples])
    all_found = [(WorstSample(**sample), image) for own in both for sample, image in own]
    samples = _worst_of(all_found, n)
    return Worst([sample for sample, _ in samples], [image for _, image in samples])


def _worst_of(found: Sequence[Any], n: int) -> list[Any]:
    # NaN counts as the highest loss.
    return nlargest(
        n, found, key=lambda value: math.inf if math.isnan(value[0].loss) else value[0].loss
    )


def _described(
    batch: Batch,
    values: torch.Tensor,
    outputs: torch.Tensor,
    loss: SampleLoss,
    source: Source,
    classes: Sequence[str] | None,
    row: int,
    place: int,
) -> WorstSample:
    number = place if batch.indices is None else int(batch.indices[row])
    where = source.where(number) if isinstance(source, Pipeline) else None
    assert torch.is_tensor(batch.targets)
    target, predicted, probability = loss.compared(outputs[row], batch.targets[row].cpu())
    if classes is not None and probability is not None:
        target, predicted = (
            classes[at] if 0 <= at < len(classes) else at for at in (target, predicted)
        )
    return WorstSample(float(values[row]), number, where or "", target, predicted, probability)


def _image(batch: Batch, row: int) -> torch.Tensor | None:
    tensor = batch.inputs
    if not torch.is_tensor(tensor) or tensor.dim() != 4:
        return None
    is_image = tensor.shape[1] in (1, 3) or tensor.shape[3] in (1, 3)
    return tensor[row].cpu().contiguous().clone() if is_image else None


def _pixels(image: torch.Tensor) -> Any:
    if image.shape[0] in (1, 3):
        image = image.permute(1, 2, 0)
    if image.dtype != torch.uint8:
        low, high = image.min(), image.max()
        image = (image - low) / (high - low).clamp_min(1e-12)
    return image.squeeze(2).numpy()


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return rounded(value) if isinstance(value, float) else str(value)
