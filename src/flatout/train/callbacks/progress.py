"""Display of a running fit on a terminal or in a log file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.constrain import Constrain
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column, Table

from flatout.console import folded
from flatout.terminal import Console
from flatout.train.callbacks.callback import Callback
from flatout.train.callbacks.rate import Rate
from flatout.words import clock, count_words, rounded

if TYPE_CHECKING:
    from flatout.train.state import FitState

_LOOKS_PER_S = 10
_DRAWINGS_PER_S = 4
_SMOOTHED_OVER_S = 3.0


class Progress(Callback):
    """A live bar on a terminal, one plain line a minute elsewhere, and a line after each epoch.

    The bar shows throughput, time left in the epoch, mean loss, and the fraction of the time that
    is spent waiting for input. It is drawn at intervals of time: `every` follows the measured
    steps, so that `on_step` is called about 10 times a second. The loss is read only when it is
    drawn.

    With more than 20 epochs, an epoch that ends within a second of the last line gets no line,
    except the final epoch. New notes in the History, such as a step that ran in smaller
    micro-batches, are printed too.
    """

    def __init__(
        self, *, console: Console | None = None, line_every: float = 60.0, bar: bool = True
    ) -> None:
        self.every = 1
        self._shows_bar = bar
        self._console = console
        self._line_every = line_every
        self._rate = Rate()
        self._smooth = 0.0
        self._bar: _Bar | None = None
        self._unsaid: str | None = None
        self._notes_said = 0

    def on_fit_start(self, state: FitState) -> None:
        """Open the bar, or start the wait for the first line."""
        # Created here, because stderr may have been replaced since `__init__`.
        self._out = self._console or Console(stderr=True)
        self._live = self._out.is_interactive and self._shows_bar
        self._smooth = 0.0
        self._unsaid = None
        # The History of a resumed fit has the notes of the fit before.
        self._notes_said = len(state.history.notes)
        self._said_at = -math.inf
        self._draw_at = perf_counter() + (0.0 if self._live else self._line_every)
        if self._live:
            self._bar, self._task = _open_bar(self._out)

    def on_epoch_start(self, state: FitState) -> None:
        """Start a new bar, and leave the time between epochs out of the throughput."""
        self._say_notes(state)
        now = perf_counter()
        self._rate.restart(state.samples)
        self._began = state.step_in_epoch, state.samples
        self._looked_step, self._looked_at = state.step, now
        self._rated_at, self._waited, self._waited_at = now, _waited(state), now
        if now >= self._draw_at:
            self._draw(state)

    def on_step(self, state: FitState) -> None:
        """Draw the bar or print a line, if enough time has passed."""
        now = perf_counter()
        steps, elapsed = state.step - self._looked_step, max(now - self._looked_at, 1e-9)
        self._looked_step, self._looked_at = state.step, now
        # The interval grows in stages, since the times of the first steps do not predict those of
        # later steps.
        self.every = max(1, min(int(steps / elapsed / _LOOKS_PER_S), 4 * self.every))
        if now < self._draw_at:
            return
        if self._bar is not None:
            self._draw_at = now + 1 / _DRAWINGS_PER_S
            self._draw(state)
        else:
            self._draw_at = now + self._line_every
            self._say("  ".join([_epoch_of(state), *self._figures(state)]))

    def on_epoch_end(self, state: FitState) -> None:
        """Print the figures of the epoch."""
        self._say_notes(state)
        line = _epoch_line(state, self._out.width if self._live else math.inf)
        final = state.epoch + 1 >= state.epochs or state.stop_reason is not None
        if final or state.epochs <= 20 or perf_counter() - self._said_at >= 1.0:
            self._say(line)
            self._unsaid = None
        else:
            self._unsaid = line

    def on_fit_end(self, state: FitState) -> None:
        """Close the bar, and print the final epoch and the reason for an early end."""
        self._close()
        if self._unsaid is not None:
            self._say(self._unsaid)
        if state.stop_reason is not None:
            self._say(f"stopped: {state.stop_reason}")
        self._say_notes(state)

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Close the bar, so that the terminal is whole again."""
        self._close()

    def _draw(self, state: FitState) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task,
                total=state.steps_per_epoch,
                completed=state.step_in_epoch,
                description=_epoch_of(state),
                figures=" ".join(self._figures(state)),
            )
            self._bar.refresh()

    def _figures(self, state: FitState) -> list[str]:
        """Return figures of the running epoch, in words. Reads the loss."""
        done, total = state.step_in_epoch, state.steps_per_epoch
        figures = [f"{done / total:.0%}" if total else f"step {done:,}"]
        rate = self._throughput(state)
        if not done or not rate:
            return figures
        figures.append(f"{count_words(rate)} samples/s")
        if total:
            figures.append(f"ETA {clock((total - done) * self._step_size(state) / rate)}")
        figures.append(f"loss {_figure(state.read_loss())}")
        figures.append(f"input wait {self._input_share(state):.0%}")
        return figures

    def _throughput(self, state: FitState) -> float:
        """Return samples per second, smoothed over some seconds; 0 before the first steps."""
        since = perf_counter() - self._rated_at
        rate = self._rate.samples_per_s(state.samples)
        self._rated_at += since
        if rate and self._smooth:
            rate = self._smooth + (1 - math.exp(-since / _SMOOTHED_OVER_S)) * (rate - self._smooth)
        self._smooth = rate or self._smooth
        return self._smooth

    def _step_size(self, state: FitState) -> float:
        """Return the samples of a step, as the mean over this epoch's steps so far."""
        step, samples = self._began
        return (state.samples - samples) / max(1, state.step_in_epoch - step)

    def _input_share(self, state: FitState) -> float:
        """Return the fraction of the time since the last drawing that was a wait for input."""
        waited, at = _waited(state), perf_counter()
        share = (waited - self._waited) / max(at - self._waited_at, 1e-9)
        self._waited, self._waited_at = waited, at
        return min(max(share, 0.0), 1.0)

    def _say_notes(self, state: FitState) -> None:
        for note in state.history.notes[self._notes_said :]:
            self._say(f"note: {note}")
        self._notes_said = len(state.history.notes)

    def _say(self, line: str) -> None:
        self._said_at = perf_counter()
        text = folded(line, self._out.file)
        self._out.print(text, markup=False, highlight=False, soft_wrap=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _Bar(RichProgress):
    """A bar that leaves room for a terminal's `^C`, which would else start a new line."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Narrower(self.make_tasks_table(self.tasks))


class _Narrower:
    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(
        self, console: console.Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        yield Constrain(self._table, options.max_width - 3)


def _open_bar(out: Console) -> tuple[_Bar, TaskID]:
    bar = _Bar(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
        TextColumn("{task.fields[figures]}"),
        console=out,
        expand=True,
        transient=True,
        # The training loop draws the bar itself: a separate thread would hold the interpreter's
        # lock.
        auto_refresh=False,
        # The script's own output goes above the bar; output to a file is not redirected.
        redirect_stdout=sys.stdout.isatty(),
    )
    bar.start()
    return bar, bar.add_task("", figures="")


def _waited(state: FitState) -> float:
    """Return the seconds spent waiting for input since the fit began."""
    timeline = state.history.timeline
    return timeline.lanes()["input"] * timeline.steps / 1e3


def _epoch_of(state: FitState) -> str:
    return f"epoch {state.epoch + 1}/{state.epochs}"


def _epoch_line(state: FitState, width: float) -> str:
    words = [_epoch_of(state)]
    if (done := state.step_in_epoch) and (times := state.history.step_times[-done:]).size:
        samples = state.history.timeline.step_samples()[-done:]
        words.append(f"{count_words(samples.sum() / times.sum())} samples/s")
    logs = dict(state.logs)
    seconds = logs.pop("seconds", None)
    for name, value in logs.items():
        # A validation figure is shown after the training figure of the same name.
        if name.removeprefix("val_") not in logs or not name.startswith("val_"):
            val = f" val {_figure(logs['val_' + name])}" if f"val_{name}" in logs else ""
            words.append(f"{name} {_figure(value)}{val}")
    if seconds is not None:
        words.append(f"{rounded(seconds, 2)} s" if seconds < 10 else clock(seconds))
        # If a line is too long, the seconds are left out, because the bar has shown them.
    if seconds is not None and len("  ".join(words)) > width:
        words.pop()
    return "  ".join(words)


def _figure(value: float) -> str:
    """Return a figure with three or four significant digits: 0.9758, 0.0667, 12.34."""
    return rounded(value) if abs(value) < 0.1 else rounded(value, 4)
