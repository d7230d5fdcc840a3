"""The state of a running fit that callbacks receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flatout.recipe import ResolvedRecipe
from flatout.train.history import History
from flatout.train.loop import Loop
from flatout.train.signature import Signature


class FittingTrainer(Protocol):
    """The attributes of a Trainer that a fit uses; described at `flatout.Trainer`."""

    devices: int
    history: History | None
    input_lines: Sequence[str]
    loop: Loop
    signature: Signature | None

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of classes by number, or None."""

    @property
    def model(self) -> Any:
        """The user's own object."""

    @property
    def optimizer(self) -> Any:
        """The optimizer; None before it is made."""

    @property
    def resolved(self) -> ResolvedRecipe | None:
        """Settings of the latest steps, with reasons."""

    @property
    def scheduler(self) -> Any:
        """The learning rate scheduler, or None."""

    def fit(self, *args: Any, **kwargs: Any) -> History:
        """Train."""

    def get_ready(self) -> None:
        """Drop the state of earlier fits."""

    def save_checkpoint(self, score: float | None = None) -> str:
        """Write a checkpoint, and return its path."""


@dataclass
class FitState:
    """The state of one `fit`, handed to every callback.

    Attributes:
        trainer: the Trainer that fits.
        history: the History being filled.
        epochs: number of epochs that `fit` was asked for.
        steps_per_epoch: optimizer steps per epoch; None if the source's length is unknown.
        batch_size: samples that a full optimizer step has.
        epoch: number of the current epoch, from 0.
        step: optimizer steps done since training began (a resume continues the count).
        step_in_epoch: optimizer steps done in this epoch.
        logs: figures of the last finished epoch, such as `loss`, `val_loss`, `seconds`.
        stop_reason: the reason for an early end, once an early end was requested.
    """

    trainer: FittingTrainer
    history: History
    epochs: int
    steps_per_epoch: int | None
    batch_size: int
    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    logs: dict[str, float] = field(default_factory=dict)
    stop_reason: str | None = None

    def stop(self, reason: str) -> None:
        """End training after this step; the reason is kept in the History.

        Any rank may call it, and all ranks end after the same step. If all ranks call it after one
        step, training ends after that step. If only some ranks call it, training ends after the
        next step or at the end of the epoch. Ranks that step alone (`world.strategy=local_sgd`)
        end when they next average.
        """
        self.stop_reason = reason

    def read_loss(self) -> float:
        """Return the mean loss of this epoch's steps so far.

        The call waits for the device: use it rarely.
        """
        return self.trainer.loop.mean_loss()

    def read_step_loss(self) -> float:
        """Return the loss of the latest step alone.

        The call waits for the device: use it rarely.
        """
        return self.trainer.loop.step_loss()

    @property
    def samples(self) -> int:
        """Samples that the steps of this fit have trained on, of all ranks, without padding."""
        timeline = self.history.timeline
        return timeline.samples + timeline.behind[1]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first parameter group, scaled by the learning-rate rule."""
        return self.trainer.loop.learning_rate

    @property
    def model(self) -> Any:
        """The user's own model object."""
        return self.trainer.model
