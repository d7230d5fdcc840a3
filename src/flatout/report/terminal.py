"""Report of `flatout demo`: its jobs side by side, and the settings that `auto` changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flatout.recipe import ResolvedRecipe
from flatout.words import rounded

_CALM = 1.5
"""Largest ratio of the 90th percentile of step times to the median on a quiet machine."""


@dataclass(frozen=True)
class JobResult:
    """One way of running a training job, with its results.

    Attributes:
        step_p90_ms: 90th percentile of the milliseconds of a step.
        epochs: number of trained epochs; a fraction if time ran out.
        seconds: seconds of the whole job, including the time before and between the steps.
        accuracy: accuracy on held-out data, from 0 to 1; None if it cannot be compared.
    """

    name: str
    images_per_s: float
    step_ms: float
    step_p90_ms: float
    epochs: float
    seconds: float
    accuracy: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A table of jobs; speeds are relative to the first job."""

    jobs: Sequence[JobResult]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("")
        for header in ("images/s", "step", "epochs", "whole job", "accuracy", "speed"):
            table.add_column(header, justify="right", no_wrap=True)
        for job in self.jobs:
            table.add_row(
                Text(job.name),
                f"{job.images_per_s:,.0f}",
                f"{rounded(job.step_ms)} ms",
                rounded(job.epochs),
                f"{job.seconds:.1f} s",
                "not compared" if job.accuracy is None else f"{job.accuracy:.2%}",
                Text(f"{job.images_per_s / self.jobs[0].images_per_s:.2f}x", style="bold"),
            )
        yield table
        if any(job.step_p90_ms > _CALM * job.step_ms for job in self.jobs):
            yield Text("step times varied much: this machine was busy, so the speeds are rough")


@dataclass(frozen=True)
class Changes:
    """Differences of a resolved Recipe from plain PyTorch, with reasons and measurements."""

    recipe: ResolvedRecipe

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = self.recipe.changes()
        if not rows:
            yield Text("as plain PyTorch: no setting was changed")
        for row in rows:
            line = Table.grid(padding=(0, 2))
            for name in ("field", "value", "parity", "ratio"):
                line.add_column(min_width=max(len(getattr(row, name)) for row in rows))
            line.add_row(*map(Text, (row.field, row.value, row.parity, row.ratio)))
            yield line
            yield Padding(Text(row.reason, style="dim"), (0, 0, 0, 4), expand=False)
