"""Speed-up by more ranks: compares runs of one job on 1 to N ranks.

    Scaling.from_runs(["runs/one", "runs/two"])

Every step is compared with that of the smallest run. With the same speed per rank as in that run, a
step would take the ideal time for its samples. The time beyond the ideal is divided by cause:

- sync: summing gradients, without waiting for slower ranks
- imbalance: the time of the slowest rank beyond the mean of all ranks
- input, evaluation, saving: time of these lanes beyond the ideal
- compute: the rest, such as parts of a batch that are too small for the device, or shared CPUs
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from flatout.errors import FlatoutError
from flatout.plotting import figure_class
from flatout.report.explain import no_figures
from flatout.words import counted, rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAUSES = ("sync", "imbalance", "input", "evaluation", "saving", "compute")
# Lanes of a rank's own work in a step: without waiting for other ranks, and not between steps.
_OWN = ("input", "copy", "forward", "backward", "optimizer", "host", "gc")
# Maximum number of letters of a run's name in a line next to its bar.
_LABEL = 24
# Largest efficiency that is plausible: with more caches, a rank may be a little faster.
_MOST_EFFICIENT = 1.2
# Figures, in order of preference: the first figure that all runs have is shown.
_FIGURES = ("val_accuracy", "accuracy", "val_loss", "loss")


@dataclass(frozen=True)
class ScalingRun:
    """One run's figures, as `History.save` wrote them."""

    name: str
    world_size: int
    batch_size: int
    step_ms: float
    lanes: Sequence[Mapping[str, float]]
    startup_s: float | None
    figures: Mapping[str, float | None]

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step_ms * 1e3

    def lane(self, name: str) -> float:
        return mean(lanes[name] for lanes in self.lanes)

    @property
    def imbalance_ms(self) -> float:
        own = [sum(lanes[name] for name in _OWN) for lanes in self.lanes]
        return max(own) - mean(own)


@dataclass(frozen=True)
class Scaling:
    """Runs by their number of ranks, the smallest first."""

    runs: Sequence[ScalingRun]

    @classmethod
    def from_runs(cls, paths: Sequence[str | os.PathLike[str]]) -> Scaling:
        """Read runs.

        Args:
            paths: run folders, or files that `History.save` wrote.

        Raises:
            FlatoutError: a file is missing or of another kind, or no run is named.
        """
        if not paths:
            raise FlatoutError("no run was named", do="name the folders of runs to compare")
        runs = [_read(Path(path)) for path in paths]
        return cls(sorted(runs, key=lambda run: (run.world_size, run.name)))

    def speedup(self, run: ScalingRun) -> float:
        """Return samples per second as a multiple of the smallest run's."""
        return run.samples_per_s / self.runs[0].samples_per_s

    def efficiency(self, run: ScalingRun) -> float:
        """Return the speed-up as a share of the factor by which the number of ranks grew."""
        return self.speedup(run) * self.runs[0].world_size / run.world_size

    def is_held_up(self, run: ScalingRun) -> bool:
        """Return whether a run is faster than its number of ranks can explain.

        In this case something slowed down the smallest run, so its speed is too low for a
        comparison.
        """
        return self.efficiency(run) > _MOST_EFFICIENT

    def lost_ms(self, run: ScalingRun) -> dict[str, float]:
        """Return by cause a step's milliseconds beyond the ideal; negative if below the ideal."""
        first = self.runs[0]
        share = run.batch_size / first.batch_size * first.world_size / run.world_size

        def more(name: str) -> float:
            return run.lane(name) - share * first.lane(name)

        lost = {name: more(name) for name in ("input", "evaluation", "saving")}
        lost["imbalance"] = run.imbalance_ms - share * first.imbalance_ms
        lost["sync"] = more("sync") - lost["imbalance"]
        lost["compute"] = run.step_ms - share * first.step_ms - sum(lost.values())
        return {cause: lost[cause] for cause in CAUSES}

    @property
    def figure(self) -> str | None:
        """Name of the figure that all runs have, accuracy before loss."""
        return next(
            (name for name in _FIGURES if all(name in run.figures for run in self.runs)), None
        )

    def describe(self) -> list[str]:
        """Return a line for each larger run, with the causes of its lost time."""
        lines = []
        for run in self.runs[1:]:
            if self.is_held_up(run):
                first = self.runs[0]
                each = run.samples_per_s / run.world_size
                lines.append(
                    f"{run.name}: no speed-up is shown: each rank gave {rounded(each)} samples/s "
                    f"here and {rounded(first.samples_per_s / first.world_size)} in {first.name}. "
                    f"Something slowed {first.name} down: run it again"
                )
                continue
            lost = self.lost_ms(run)
            total = sum(lost.values())
            line = f"{run.name}: a step takes {rounded(run.step_ms)} ms, ideal were "
            line += rounded(run.step_ms - total)
            named = [
                f"{cause} {rounded(ms, 2)}"
                for cause, ms in sorted(lost.items(), key=lambda value: -value[1])
                if ms > 0.02 * run.step_ms
            ]
            lines.append(f"{line}; lost to {', '.join(named)}" if named else line)
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: a row for each run."""
        return {
            "runs": [
                {
                    "name": run.name,
                    "world_size": run.world_size,
                    "batch_size": run.batch_size,
                    "samples_per_s": run.samples_per_s,
                    "speedup": None if self.is_held_up(run) else self.speedup(run),
                    "efficiency": None if self.is_held_up(run) else self.efficiency(run),
                    "step_ms": run.step_ms,
                    "lost_ms": None if self.is_held_up(run) else self.lost_ms(run),
                    "startup_s": run.startup_s,
                    "figures": dict(run.figures),
                }
                for run in self.runs
            ]
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        table.add_column("run", overflow="fold")  # long names wrap, figures do not
        headers = ["ranks", "samples/s", "speed", "efficiency", "ms/step", "start"]
        for header in [*headers, self.figure or ""]:
            table.add_column(header, justify="right", no_wrap=True)
        for run in self.runs:
            figure = run.figures[self.figure] if self.figure else None
            table.add_row(
                Text(run.name),
                str(run.world_size),
                f"{run.samples_per_s:,.0f}",
                Text("-" if self.is_held_up(run) else f"{self.speedup(run):.2f}x", style="bold"),
                "-" if self.is_held_up(run) else f"{self.efficiency(run):.0%}",
                rounded(run.step_ms),
                "" if run.startup_s is None else f"{run.startup_s:.1f} s",
                "" if figure is None else rounded(figure, 4),
            )
        yield table
        for line in self.describe():
            yield Text(line)

    def plot(self, path: str | os.PathLike[str]) -> Figure:
        """Draw throughput, and the lost time of a step by cause, into an image file.

        Args:
            path: file with the ending .png, .svg or .pdf, which decides the format.

        Raises:
            FlatoutError: matplotlib is missing, or the file cannot be written.
        """
        figure_of = figure_class()
        figure = figure_of(figsize=(10, max(4.0, 0.7 * len(self.runs))), layout="constrained")
        speed, step = figure.subplots(1, 2)
        sizes = [run.world_size for run in self.runs]
        each = self.runs[0].samples_per_s / sizes[0]
        speed.plot(sizes, [each * size for size in sizes], ":", color="0.5", label="ideal")
        speed.plot(sizes, [run.samples_per_s for run in self.runs], "o-", label="measured")
        speed.set(title="throughput", xlabel="ranks", ylabel="samples/s", ylim=(0, None))
        speed.set_xticks(sizes)
        speed.legend(loc="upper left")
        self._plot_steps(step)
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise FlatoutError(f"cannot draw: {error}", where=str(path)) from error
        return figure

    def _plot_steps(self, axes: Axes) -> None:
        nothing = dict.fromkeys(CAUSES, 0.0)
        lost = [nothing if self.is_held_up(run) else self.lost_ms(run) for run in self.runs]
        left = [
            run.step_ms - sum(max(0.0, ms) for ms in of.values())
            for run, of in zip(self.runs, lost, strict=True)
        ]
        places = range(len(self.runs))
        axes.barh(places, left, color="0.8", label="ideal")
        for cause in CAUSES:
            widths = [max(0.0, of[cause]) for of in lost]
            if max(widths) >= 0.01:
                axes.barh(places, widths, left=left, label=cause)
                left = [low + width for low, width in zip(left, widths, strict=True)]
        axes.set(title="a step's time, and what was lost", xlabel="ms")
        names = [[*wrap(run.name, _LABEL), counted(run.world_size, "rank")] for run in self.runs]
        axes.set_yticks(places, list(map("\n".join, names)))
        axes.invert_yaxis()
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _read(path: Path) -> ScalingRun:
    file = path / "history.json" if os.path.isdir(path) else path
    try:
        data = json.loads(file.read_text())
        lanes = data["lanes_by_rank_ms"]
        run = ScalingRun(
            name=path.name if os.path.isdir(path) else path.stem,
            world_size=data["world_size"],
            batch_size=data["batch_size"],
            step_ms=max(sum(of.values()) for of in lanes) if lanes else 0.0,
            lanes=lanes,
            startup_s=data["startup_s"],
            figures=data["epochs"][-1] if data["epochs"] else {},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise no_figures(file, error) from error
    if run.step_ms <= 0 or len(lanes) != run.world_size:
        raise FlatoutError(
            "the run has no figures of all its ranks: it has not trained to its end",
            where=str(file),
            do="train it again, or leave it out",
        )
    return run
