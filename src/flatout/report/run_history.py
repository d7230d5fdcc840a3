"""All runs below a folder, the newest last.

    History.below("runs").table()

Each run folder has its own history: JSON lines that are only appended to, without a server or
locks. Folders of checkpoints are not searched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from flatout.errors import FlatoutError
from flatout.measure import RUNS
from flatout.report.run import Life, lives_of
from flatout.words import count_words, counted, duration, rounded

SHOWN = 20
"""Maximum number of runs in the table; `--json` lists all runs."""

# Folders within a run folder that are not searched, since they contain no runs.
_NOT_RUNS = {"checkpoints"}
# Figures, in order of preference: a table row shows the first figure that the run has.
_FIGURES = ("val_accuracy", "val_auc", "val_loss", "accuracy", "auc", "loss")


@dataclass(frozen=True)
class Row:
    run: str
    life: Life

    @property
    def began(self) -> float:
        time = self.life.began.get("time")
        return float(time) if isinstance(time, int | float) else 0.0

    @property
    def figure(self) -> tuple[str, float] | None:
        figures = (self.life.ended or {}).get("figures") or {}
        for name in _FIGURES:
            if isinstance(figures.get(name), int | float):
                return name, float(figures[name])
        return None

    def as_dict(self) -> dict[str, Any]:
        end = dict(self.life.ended or {})
        took = end["time"] - self.began if "time" in end else None
        for name in ("event", "id", "time"):
            end.pop(name, None)
        known = {name: v for name, v in self.life.began.items() if name not in ("event", "time")}
        return {"run": self.run, "began": self.began, "seconds": took, **known, **end} | {
            "state": self.life.state
        }

    def cells(self) -> list[str]:
        end = self.life.ended or {}
        rate, took = end.get("samples_per_s"), end.get("time")
        figure = self.figure
        return [
            self.run,
            datetime.fromtimestamp(self.began).strftime("%m-%d %H:%M"),
            self.life.state,
            "" if not isinstance(took, int | float) else duration(max(0.0, took - self.began)),
            str(end.get("steps", "")),
            count_words(rate) if isinstance(rate, int | float) else "",
            "" if figure is None else f"{figure[0]} {rounded(figure[1], 4)}",
        ]


@dataclass(frozen=True)
class RunHistory:
    """Runs in the order in which they began."""

    folder: str
    rows: list[Row]

    @classmethod
    def below(cls, folder: str | os.PathLike[str]) -> RunHistory:
        """Find the runs below a folder.

        Raises:
            FlatoutError: the folder does not exist, or contains no run.
        """
        root = Path(folder)
        if not os.path.isdir(root):
            raise FlatoutError(
                "expected a folder with runs, found none",
                where=str(folder),
                do="flatout runs FOLDER; runs write below what Trainer(..., run=...) was given",
            )
        rows = [
            Row(os.path.relpath(path, root), life)
            for path in _folders(root)
            for life in lives_of(path)
        ]
        if not rows:
            raise FlatoutError(
                "no run has left its history below this folder",
                where=str(folder),
                do="train with Trainer(..., run=...) or Loop(run=...), or name another folder",
            )
        return cls(str(folder), sorted(rows, key=lambda row: row.began))

    def as_dict(self) -> dict[str, Any]:
        """Return all rows as plain data."""
        return {"folder": self.folder, "runs": [row.as_dict() for row in self.rows]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("run", overflow="fold")
        for header in ("began", "state"):
            table.add_column(header, no_wrap=True)
        for header in ("took", "steps", "samples/s"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        rows = self.rows[-SHOWN:]
        for row in rows:
            table.add_row(*map(Text, row.cells()))
        yield table
        if len(rows) < len(self.rows):
            yield Text(f"the newest of {counted(len(self.rows), 'run')}; --json has all", "dim")


def _folders(root: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(root):
        folders[:] = sorted(folder for folder in folders if folder not in _NOT_RUNS)
        if RUNS in files:
            yield Path(path)
