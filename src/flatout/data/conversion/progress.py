"""Progress of work on rows, shown on a terminal after the first second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from flatout.terminal import Console
from flatout.words import clock, count_words

# Seconds before a terminal shows a bar.
_QUIET_S = 1.0
_DRAWINGS_PER_S = 4
# Reports the number of rows done so far, and further words.
Told: TypeAlias = Callable[[int, str], None]


@contextmanager
def progress(
    what: str, total: int | None, show: bool = True, line_every_s: float = 60.0
) -> Iterator[Told]:
    """Show a live bar on a terminal, or else one line a minute; both on standard error."""
    if not show:
        yield lambda done, words: None
        return
    bar = _Shown(what, total, line_every_s)
    try:
        yield bar.tell
    finally:
        bar.close()


class _Shown:
    def __init__(self, what: str, total: int | None, line_every_s: float) -> None:
        self._what, self._total, self._line_every_s = what, total, line_every_s
        self._out = Console(stderr=True, highlight=False)
        self._began = time.monotonic()
        self._first: int | None = None  # rows that were there already
        quiet = _QUIET_S if self._out.is_interactive else line_every_s
        self._draw_at = self._began + quiet
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def tell(self, done: int, words: str) -> None:
        if self._first is None:
            self._first = done
        now = time.monotonic()
        if now < self._draw_at:
            return
        figures = "  ".join(self._figures(done, now - self._began, words))
        if not self._out.is_interactive:
            self._draw_at = now + self._line_every_s
            self._out.print(f"{self._what}  {figures}", markup=False, soft_wrap=True)
            return
        self._draw_at = now + 1 / _DRAWINGS_PER_S
        if self._bar is None:
            self._open()
        assert self._bar is not None
        self._bar.update(self._task, completed=done, figures=figures)
        self._bar.refresh()

    def _figures(self, done: int, seconds: float, words: str) -> Iterator[str]:
        if self._total:
            yield f"{done / self._total:.0%}"
        yield f"{count_words(done)} rows"
        rate = (done - (self._first or 0)) / max(seconds, 1e-9)
        yield f"{count_words(rate)} rows/s"
        if self._total and rate:
            yield f"ETA {clock((self._total - done) / rate)}"
        if words:
            yield words

    def _open(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            TextColumn("{task.fields[figures]}"),
            console=self._out,
            expand=True,
            transient=True,
            auto_refresh=False,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._what, total=self._total, figures="")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
