"""A checkpoint of the best epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.errors import CheckpointError
from flatout.train.callbacks.callback import Callback, Figures
from flatout.train.callbacks.monitor import Mode, Monitor
from flatout.train.rank_trial import is_trial

if TYPE_CHECKING:
    from flatout.train.state import FitState


class BestCheckpoint(Callback):
    """Saves a checkpoint whenever the watched figure is the best so far.

    Attributes:
        best: best value of the figure so far; None before the first epoch's end.
        path: path of the best epoch's checkpoint; None before the first checkpoint.
        scored_by: the figure by which checkpoints of a run are scored; a resume cannot change it.
    """

    def __init__(self, monitor: str = "val_loss", mode: Mode = "auto") -> None:
        self._monitor = Monitor(monitor, mode)
        self.scored_by = f"{monitor} ({self._monitor.mode})"
        self.path: str | None = None
        self._resumed = False

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first."""
        return self._monitor.best

    def check(self, state: FitState, figures: Figures) -> None:
        """Refuse a figure that the logs will not have, and a fit without a run folder."""
        if state.trainer.loop.run is None and not is_trial():
            raise CheckpointError(
                "there is no run folder, which BestCheckpoint writes into",
                do="give the Trainer one: Trainer(..., run='runs/name')",
            )
        self._monitor.check(figures)

    def on_fit_start(self, state: FitState) -> None:
        """Delete the state of an earlier fit, unless this fit resumes it."""
        if not self._resumed:
            self._monitor.best, self.path = None, None

    def on_epoch_end(self, state: FitState) -> None:
        """Save if this epoch is the best."""
        value = self._monitor.read(state.logs)
        if self._monitor.improves(value):
            # The checkpoint with the smallest score is kept, so an accuracy is negated.
            score = value if self._monitor.mode == "min" else -value
            self.path = state.trainer.save_checkpoint(score=score)

    def on_fit_end(self, state: FitState) -> None:
        """Let the next fit delete the state, unless that fit resumes."""
        self._resumed = False

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Let the next fit delete the state, unless that fit resumes."""
        self._resumed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the figure's name, the best value and its checkpoint."""
        return {"monitor": self._monitor.name, "best": self.best, "path": self.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._monitor.best = state["best"]
        self.path = state["path"]
        self._resumed = True
