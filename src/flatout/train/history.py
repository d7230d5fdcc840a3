"""History: the figures that a fit returns."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flatout.atomic_file import atomic_write
from flatout.errors import FlatoutError
from flatout.measure import LANES, Timeline
from flatout.plotting import figure_class
from flatout.train.explanation import Explanation
from flatout.train.explanation_picture import draw
from flatout.train.losses.confusion import Matrix, draw_confusion, names_of, recall_of
from flatout.words import counted, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flatout.optim import LrScale
    from flatout.recipe import ResolvedRecipe


@dataclass
class History:
    """The figures of a fit, by epoch and by step.

    Attributes:
        batch_size: samples of a full optimizer step; a last step may have fewer.
        timeline: times of the steps by lane, which is a kind of work such as "forward" or "input".
        epochs: the logs of each epoch, such as `loss`, `val_accuracy`, `seconds`.
        recipe: settings of the steps; None before they were decided.
        lr_scale: factors of the learning rate by the rule for large batches; None without a rule.
        notes: lines reported while training, such as a step repeated in smaller parts.
        stop_reason: the reason for an early end of training; None without one.
        world_size: number of ranks that trained together.
        nodes: number of nodes with these ranks.
        startup_s: seconds from the start of this process to its first step; None before that step.
        lanes_by_rank: for each rank, milliseconds per step by lane, at the end of training.
        classes: names of the classes by number; empty where the data name none.
        tuning: settings that were measured, and on which steps, as plain data; None where no
            setting was open.
        evaluation: measurements of validations, as plain data: sizes of batches, and the forward as
            one compiled graph. None where validations were too short.
        features: the decision on keeping features of frozen leading layers, as plain data; None
            without frozen layers.
        roofline: operators of the first step, as `flatout.measure.bound` takes them; those of a
            later step if the set of training layers changed. None before the step, and for a
            compiled model.
        confusion: samples of the latest validation by true class (row) and predicted class
            (column); None where the metrics have no "confusion".
        staleness: age in steps of the gradients that parameter servers used: `mean`, the maximum
            `most`, and in `by_rank` the number of gradients by age. None if all ranks step
            together.
        late: by rank, the number of gradients that were dropped because they came too late for
            their step. None unless `world.spare_workers` allows that.
        largest_batch: the decision of `batch_size="auto"`, as plain data; None without it.
        first_epoch: the number of the first epoch in `epochs`, counted from 0.
        skipped_steps: number of steps that fp16 left out because their gradients overflowed.
    """

    batch_size: int
    timeline: Timeline = field(default_factory=Timeline, repr=False)
    epochs: list[dict[str, float]] = field(default_factory=list)
    recipe: ResolvedRecipe | None = field(default=None, repr=False)
    lr_scale: LrScale | None = field(default=None, repr=False)
    notes: list[str] = field(default_factory=list)
    stop_reason: str | None = None
    world_size: int = 1
    nodes: int = 1
    startup_s: float | None = None
    lanes_by_rank: list[dict[str, float]] = field(default_factory=list, repr=False)
    classes: list[str] = field(default_factory=list, repr=False)
    tuning: dict[str, Any] | None = field(default=None, repr=False)
    evaluation: dict[str, Any] | None = field(default=None, repr=False)
    features: dict[str, Any] | None = field(default=None, repr=False)
    roofline: dict[str, Any] | None = field(default=None, repr=False)
    confusion: Matrix | None = field(default=None, repr=False)
    staleness: dict[str, Any] | None = field(default=None, repr=False)
    late: list[int] | None = field(default=None, repr=False)
    largest_batch: dict[str, Any] | None = field(default=None, repr=False)
    first_epoch: int = field(default=0, repr=False)
    skipped_steps: int = field(default=0, repr=False)

    def __repr__(self) -> str:
        return f"<History: {self.summary()}>"

    @property
    def epoch(self) -> list[int]:
        """The number of each epoch in `epochs`, counted from 0."""
        return list(range(self.first_epoch, self.first_epoch + len(self.epochs)))

    @property
    def history(self) -> dict[str, list[float]]:
        """The logs by name, a value for each epoch; NaN where an epoch has no such figure."""
        names = dict.fromkeys(name for logs in self.epochs for name in logs)
        return {name: [logs.get(name, math.nan) for logs in self.epochs] for name in names}

    @property
    def step_times(self) -> npt.NDArray[np.float64]:
        """Seconds of each of the latest steps that the timeline keeps, oldest first."""
        return self.timeline.step_times()

    @property
    def throughput(self) -> float:
        """Samples per second, if each step took the median time of steps of its size.

        A smaller last batch counts with its own samples; padding does not count. The value is 0
        without a step.
        """
        times, samples = self.step_times, self.timeline.step_samples()
        order = np.argsort(samples, kind="stable")
        _, first = np.unique(samples[order], return_index=True)
        alike = np.split(times[order], first[1:])
        seconds = sum(float(np.median(some)) * some.size for some in alike if some.size)
        return float(samples.sum()) / seconds if seconds else 0.0

    def percentiles(self) -> dict[float, float]:
        """Return the 50th, 90th and 99th percentile of the step times, in seconds."""
        return self.timeline.percentiles()

    def lanes(self) -> dict[str, float]:
        """Return milliseconds per step by lane."""
        return self.timeline.lanes()

    def summary(self) -> str:
        """Return the fit in a few lines of plain words."""
        lines = [f"{counted(len(self.epochs), 'epoch')}, {counted(self.timeline.steps, 'step')}"]
        lines[0] += f" of {self._step_in_words()}"
        if self.timeline.steps:
            of = {q: f"{rounded(seconds * 1e3)} ms" for q, seconds in self.percentiles().items()}
            lines[0] += f": {self.throughput:,.0f} samples/s"
            lines.append(f"step {of[50]} at the median, {of[90]} at 90%, {of[99]} at 99%")
            lanes = sorted(self.lanes().items(), key=lambda lane: -lane[1])
            lines.append(
                "of it " + ", ".join(f"{name} {rounded(ms)}" for name, ms in lanes if ms > 5e-4)
            )
        if self.epochs:
            last = {name: value for name, value in self.epochs[-1].items() if name != "seconds"}
            lines.append(", ".join(f"{name} {rounded(value, 4)}" for name, value in last.items()))
        if self.recipe is not None:
            lines.append(f"ran {self.recipe.summary()}")
        if self.stop_reason:
            lines.append(f"stopped: {self.stop_reason}")
        return "\n".join([*lines, *self.notes])

    def _step_in_words(self) -> str:
        sizes = self.timeline.step_samples()
        largest = int(sizes.max(initial=0)) or self.batch_size
        differ = sizes.size > 0 and float(np.median(sizes)) != largest
        return f"{'up to ' if differ else ''}{counted(largest, 'sample')}"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: times in seconds, lanes in ms per step."""
        recipe = self.recipe
        return {
            "batch_size": self.batch_size,
            "steps": self.timeline.steps,
            "samples_per_s": self.throughput,
            "step_percentiles_s": {f"p{q:g}": value for q, value in self.percentiles().items()},
            "lanes_ms": self.lanes(),
            "world_size": self.world_size,
            "nodes": self.nodes,
            "startup_s": self.startup_s,
            "lanes_by_rank_ms": self.lanes_by_rank,
            "classes": list(self.classes),
            "confusion": self.confusion,
            "class_recall": self.class_recall(),
            "epochs": [dict(logs) for logs in self.epochs],
            "recipe": recipe
            and {
                "summary": recipe.summary(),
                "values": recipe.request().named(),
                "reasons": {change.field: change.reason for change in recipe.changes()},
                "measured": {change.field: change.ratio for change in recipe.changes()},
            },
            "tuning": self.tuning,
            "evaluation": self.evaluation,
            "features": self.features,
            "roofline": self.roofline,
            "staleness": self.staleness,
            "late": self.late,
            "largest_batch": self.largest_batch,
            "steady_lanes_s": self._steady_lanes(),
            "lr_scale": self.lr_scale and self.lr_scale.as_dict(),
            "notes": list(self.notes),
            "stop_reason": self.stop_reason,
            "skipped_steps": self.skipped_steps,
            "step_times_s": [round(seconds, 9) for seconds in self.step_times.tolist()],
        }

    def _steady_lanes(self) -> dict[str, float]:
        rows = self.timeline.rows()
        if self.roofline is not None:
            rows = rows[-max(1, self.timeline.steps - self.roofline["step"] + 1) :]
        spans = self.tuning["spans"] if self.tuning else []
        last = spans[-1]["last"] - spans[-1]["first"] + 1 if spans else len(rows)
        rows = rows[-max(1, last) :]
        rows = rows[len(rows) // 10 :]  # without warm-up steps
        if not len(rows):
            return {}
        middle = np.median(rows[:, 1:], axis=0) / 1e9
        return dict(zip(LANES, middle.tolist(), strict=False))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `as_dict` as JSON, whole or not at all; numbers that are not finite become null.

        Raises:
            FlatoutError: the file cannot be written.
        """
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(json.dumps(json_safe(self.as_dict()), allow_nan=False) + "\n")
        except OSError as error:
            raise FlatoutError(
                f"cannot save the history: {error.strerror}",
                where=str(path),
                do="choose a folder that can be written and has room",
            ) from error
        return path

    def class_recall(self) -> dict[str, float]:
        """Return the recall of each class in the latest validation, by the class's name.

        The result is empty without a "confusion" metric, and NaN for a class without samples.
        """
        matrix = self.confusion or []
        return dict(zip(names_of(matrix, self.classes), recall_of(matrix), strict=True))

    def plot_confusion(self, path: str | os.PathLike[str]) -> Figure:
        """Draw the confusion matrix of the latest validation into an image file.

        Args:
            path: an image file with the ending .png, .svg or .pdf.

        Raises:
            FlatoutError: no confusion was counted, or matplotlib is missing.
        """
        if self.confusion is None:
            raise FlatoutError(
                "no confusion matrix was recorded",
                do='train with metrics=["confusion"] and validation_data',
            )
        return draw_confusion(self.confusion, self.classes, Path(path))

    def explain(self) -> str:
        """Return the trials, the chosen settings with reasons, and the limits of a step.

        The first call on a machine measures its best rates, in a few seconds.
        """
        return "\n".join(Explanation.of(self.as_dict()).lines())

    def plot_roofline(self, path: str | os.PathLike[str]) -> Figure:
        """Draw the lanes of a step against this machine's limit into an image file.

        Args:
            path: an image file with the ending .png, .svg or .pdf.

        Raises:
            FlatoutError: the operators were not counted, matplotlib is missing, or the file cannot
                be written.
        """
        return draw(Explanation.of(self.as_dict()), path)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw losses and metrics by epoch, step times, and lanes.

        Args:
            path: an image file with the ending .png, .svg or .pdf. Without it the figure belongs to
                pyplot, so that notebooks and `plt.show()` display it once.

        Raises:
            FlatoutError: matplotlib is missing.
        """
        figure_of = figure_class()
        if path is not None:
            figure = figure_of(figsize=(10, 7), layout="constrained")
        else:
            figure = _figure_of_pyplot()
        (losses, metrics), (steps, lanes) = figure.subplots(2, 2)
        self._plot_epochs(losses, metrics)
        self._plot_steps(steps)
        self._plot_lanes(lanes)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure

    def _plot_epochs(self, losses: Axes, metrics: Axes) -> None:
        curves = {name: curve for name, curve in self.history.items() if name not in _NOT_CURVES}
        stems = list(dict.fromkeys(name.removeprefix("val_") for name in curves))
        for name, curve in curves.items():
            stem = name.removeprefix("val_")
            axes = losses if stem.endswith("loss") else metrics
            style = f".C{stems.index(stem)}" + ("-" if stem == name else "--")
            axes.plot(range(1, len(curve) + 1), curve, style, label=name)
        for axes, title in ((losses, "loss"), (metrics, "metrics")):
            axes.set(title=title, xlabel="epoch")
            axes.locator_params(axis="x", integer=True)
            if axes.lines:
                axes.legend()
            else:
                _say_nothing_is_here(axes)

    def _plot_steps(self, axes: Axes) -> None:
        times = self.step_times * 1e3
        axes.set(title=f"step time · {self.throughput:,.0f} samples/s", xlabel="step", ylabel="ms")
        if not times.size:
            _say_nothing_is_here(axes)
            return
        first = self.timeline.steps - len(times) + 1
        axes.plot(range(first, first + len(times)), times, linewidth=0.6, alpha=0.7)
        for q, milliseconds in zip((50, 99), np.percentile(times, (50, 99)), strict=True):
            label = f"{rounded(milliseconds)} ms at {q}%"
            axes.axhline(milliseconds, linestyle=":", color="0.3" if q == 50 else "C3", label=label)
        # A first step that compiles takes minutes; the scale should still show differences of other
        # steps.
        top = min(times.max() * 1.05, np.percentile(times, 99) * 3)
        axes.set_ylim(0, top * 1.2)  # leaves room for the legend
        axes.legend(loc="upper right", ncols=2)

    def _plot_lanes(self, axes: Axes) -> None:
        lanes = {name: ms for name, ms in self.lanes().items() if ms > 0}
        axes.set(title="where a step's time goes", xlabel="ms per step")
        if not lanes:
            _say_nothing_is_here(axes)
            return
        bars = axes.barh(list(lanes), list(lanes.values()))
        axes.bar_label(bars, labels=list(map(rounded, lanes.values())), padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()


def _figure_of_pyplot() -> Figure:
    from matplotlib import figure, pyplot

    class Shown(figure.Figure):
        def _ipython_display_(self) -> None:
            if not pyplot.fignum_exists(self.number):  # in a later cell
                raise NotImplementedError

    return pyplot.figure(figsize=(10, 7), layout="constrained", FigureClass=Shown)


# Figures of an epoch that are not plotted as learning curves.
_NOT_CURVES = ("epoch", "seconds", "samples_per_s", "lr")


def json_safe(value: Any) -> Any:
    """Return nested plain data with None for every number that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value


def _say_nothing_is_here(axes: Axes) -> None:
    axes.text(0.5, 0.5, "nothing was recorded", transform=axes.transAxes, ha="center", color="0.5")
