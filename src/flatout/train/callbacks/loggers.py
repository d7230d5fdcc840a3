"""Figures for any logger, such as TensorBoard."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from flatout.errors import ModelError
from flatout.train.callbacks.callback import Callback
from flatout.train.callbacks.rate import Rate

if TYPE_CHECKING:
    from flatout.train.state import FitState


class Logger(Protocol):
    """The logger that `Log` writes to: two methods around the tracker of your choice.

    class Tracker:
        def log(self, step, values):
            my_tracker.log(dict(values), step=step)

        def close(self):
            my_tracker.finish()
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log figures by name, such as `step/loss` or `epoch/val_accuracy`, for a step."""

    def close(self) -> None:
        """Finish after the fit has ended, with or without an error."""


class Log(Callback):
    """Sends figures of the steps and of the epochs to a logger.

    Steps give `step/loss` (mean of the epoch so far), `step/lr` and `step/samples_per_s`; epochs
    give their logs as `epoch/...`. If a logger fails with an OSError (a full disk, a lost
    connection), one warning is shown, and training continues without it.
    """

    def __init__(self, logger: Logger, every: int = 50) -> None:
        self.logger = logger
        self.every = every
        self._gave_up = False
        self._rate = Rate()

    def on_fit_start(self, state: FitState) -> None:
        """Enable a logger again that failed in an earlier fit."""
        self._gave_up = False

    def on_epoch_start(self, state: FitState) -> None:
        """Leave the time between epochs out of the throughput."""
        self._rate.restart(state.samples)

    def on_step(self, state: FitState) -> None:
        """Report the steps since the last call."""
        if self._gave_up:
            return
        figures = {
            "step/loss": state.read_loss(),
            "step/lr": state.learning_rate,
            "step/samples_per_s": self._rate.samples_per_s(state.samples),
        }
        self._log(state.step, figures)

    def on_epoch_end(self, state: FitState) -> None:
        """Report the logs of the epoch."""
        self._log(state.step, {f"epoch/{name}": value for name, value in state.logs.items()})

    def on_fit_end(self, state: FitState) -> None:
        """Close the logger."""
        self._close()

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Close the logger."""
        self._close()

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        if self._gave_up:
            return
        try:
            self.logger.log(step, figures)
        except OSError as error:
            self._give_up(error)

    def _close(self) -> None:
        try:
            self.logger.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._gave_up:
            self._gave_up = True
            warnings.warn(
                f"{type(self.logger).__name__} failed, training goes on without it: {error}",
                stacklevel=2,
            )


class TensorBoard(Log):
    """Writes event files for TensorBoard. Needs `pip install 'flatout[tensorboard]'`.

    A resumed fit hides the entries of an interrupted fit after the resumed step.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 50) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise ModelError(
                "the TensorBoard callback needs tensorboard",
                do="pip install 'flatout[tensorboard]'",
            ) from error
        self._files = _EventFiles(folder)
        super().__init__(self._files, every)

    def on_fit_start(self, state: FitState) -> None:
        """Open a new event file."""
        super().on_fit_start(state)
        try:
            self._files.open(state.step)
        except OSError as error:
            self._give_up(error)


class _EventFiles:
    """TensorBoard's writer as a Logger."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._writer: Any = None

    def open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = {"purge_step": step + 1} if step else {}
        self._writer = SummaryWriter(self._folder, **purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
