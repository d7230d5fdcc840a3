"""Early stopping: ends training when a figure no longer improves."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from flatout.models import load_weights
from flatout.train.callbacks.callback import Callback, Figures
from flatout.train.callbacks.monitor import Mode, Monitor

if TYPE_CHECKING:
    from flatout.train.state import FitState


class EarlyStopping(Callback):
    """Stops when the watched figure has not improved for some epochs.

    Args:
        monitor: the figure's name in the logs.
        patience: number of epochs without improvement that end training.
        mode: whether smaller (`min`) or larger (`max`) is better; `auto` decides by the name.
        min_delta: smallest improvement over the best value that counts.
        restore_best: whether to load the best epoch's weights into the model when training ends.

    Attributes:
        best: best value of the figure so far; None before the first epoch's end.
        best_epoch: the epoch of the best value, counted from 1; 0 before the first.
        waited: number of epochs since the best epoch.

    Raises:
        ModelError: in a fit, the logs have no such figure, or `auto` cannot tell the mode.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 3,
        mode: Mode = "auto",
        min_delta: float = 0.0,
        restore_best: bool = True,
    ) -> None:
        self._monitor = Monitor(monitor, mode, min_delta)
        self.patience = patience
        self.restore_best = restore_best
        self.best_epoch = 0
        self.waited = 0
        self._weights: dict[str, Any] = {}
        self._resumed = False
        self._watched_before: str | None = None

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first."""
        return self._monitor.best

    def check(self, state: FitState, figures: Figures) -> None:
        """Refuse a figure that the logs will not have."""
        self._monitor.check(figures)

    def on_fit_start(self, state: FitState) -> None:
        """Delete the state of an earlier fit, unless this fit resumes it."""
        if not self._resumed:
            self._monitor.best, self.best_epoch, self.waited, self._weights = None, 0, 0, {}
        if self._watched_before is not None:
            state.trainer.loop.say(
                f"EarlyStopping begins with {self._monitor.words} here: until now it watched "
                f"{self._watched_before}"
            )
            self._watched_before = None
        self._stop_if_due(state)  # a run that had stopped here is not trained further

    def on_epoch_end(self, state: FitState) -> None:
        """Compare this epoch with the best epoch."""
        value = self._monitor.read(state.logs)
        if self._monitor.improves(value):
            self.best_epoch = state.epoch + 1
            self.waited = 0
            if self.restore_best:
                self._weights = _copied(state.trainer.loop.weights())
            return
        self.waited += 1
        self._stop_if_due(state)

    def _stop_if_due(self, state: FitState) -> None:
        if self.waited and self.waited >= self.patience:
            epochs = "epoch" if self.waited == 1 else "epochs"
            state.stop(f"{self._monitor.name} did not improve for {self.waited} {epochs}")

    def on_fit_end(self, state: FitState) -> None:
        """Restore the best weights, unless the last epoch was the best."""
        self._resumed = False
        if self._weights and self.waited:
            load_weights(state.model, self._weights)
            state.history.notes.append(
                f"weights of epoch {self.best_epoch} put back: {self._monitor.name} {self.best:.6g}"
            )

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Leave the weights as they are."""
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the figure's name, its best value, and the epoch and weights of that value."""
        return {
            "monitor": self._monitor.name,
            "mode": self._monitor.mode,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "waited": self.waited,
            "weights": dict(self._weights),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; the best value of another figure is dropped."""
        if (state["monitor"], state["mode"]) != (self._monitor.name, self._monitor.mode):
            self._watched_before = f"{state['monitor']} ({state['mode']})"
            return
        self._monitor.best = state["best"]
        self.best_epoch = state["best_epoch"]
        self.waited = state["waited"]
        self._weights = dict(state["weights"])
        self._resumed = True


def _copied(weights: dict[str, Any]) -> dict[str, Any]:
    """Return new copies on the CPU, since a checkpoint may still read the earlier copies."""
    return {
        name: value.detach().to("cpu", copy=True)
        if isinstance(value, torch.Tensor)
        else deepcopy(value)
        for name, value in weights.items()
    }
