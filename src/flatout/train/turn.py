"""What steps of the same optimizers leave to the next: a job with several may step them in turn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flatout.data import Batch
from flatout.errors import CheckpointError
from flatout.optim import Update
from flatout.train.running_mean import RunningMean


class Turn:
    """The steps of one optimizer, or of several that step together.

    Args:
        places: of its optimizers among those of the job.
        update: applies the gradients.
        scaler: of the loss, where fp16 needs one.
        pieces: into how many micro-batches a batch is split.

    Attributes:
        mean_loss: of these steps.
        gathered: batches that wait for others, to make a step together.
        gathered_from: number in its epoch of the first of these.
        has_stepped: whether one of these steps was made in this process.
    """

    def __init__(
        self,
        places: tuple[int, ...],
        update: Update,
        scaler: torch.amp.GradScaler | None,
        pieces: int,
    ) -> None:
        self.places = places
        self.update = update
        self.scaler = scaler
        self.pieces = pieces
        self.mean_loss = RunningMean()
        self.gathered: list[Batch] = []
        self.gathered_from = 0
        self.has_stepped = False

    @property
    def number(self) -> int:
        """A number that no other turn of the job has, the same on every rank and in each run."""
        return sum(1 << place for place in self.places)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Those that step."""
        return tuple(part.optimizer for part in self.update.parts)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs of it."""
        return {
            "optimizers": list(self.places),
            "pieces": self.pieces,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "loss": self.mean_loss.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, same_machine: bool) -> None:
        """Go on from there; how far a batch must be split is another machine's own."""
        if same_machine:
            self.pieces = state["pieces"]
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.mean_loss.load_state_dict(state["loss"])


def check_gathered(turns: Iterable[Turn], step: int, batch: int) -> None:
    """Refuse to save where batches are gathered: a resume goes on behind the last step's batch.

    Raises:
        CheckpointError: batches that wait for others to make a step would be lost.
    """
    for turn in turns:
        if turn.gathered and 0 < turn.gathered_from <= batch:
            names = ", ".join(type(optimizer).__name__ for optimizer in turn.optimizers)
            raise CheckpointError(
                f"{len(turn.gathered)} batches that {names} has gathered for a step would be "
                "lost in a resume, since another optimizer has stepped behind them",
                where=f"step {step:,}, batch {batch:,} of the epoch",
                do="save where no optimizer waits for batches, or call "
                "loop.flush(compute, optimizer) first",
            )
