"""State that steps of the same optimizers share; a job may alternate between optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flatout.data import Batch
from flatout.errors import CheckpointError, FlatoutError
from flatout.optim import Optimizers, Update, as_tuple, optimizer_adapter
from flatout.train.running_mean import RunningMean
from flatout.train.settings import Switch


class Turn:
    """The steps of one optimizer, or of several that step together.

    Attributes:
        mean_loss: mean loss of these steps.
        gathered: accumulated batches that wait for more batches, to make a step together.
        gathered_from: index in the epoch of the first gathered batch.
        has_stepped: whether the turn has made a step in this process.
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
        """Id of this turn within the job, the same on every rank and in each run."""
        return sum(1 << place for place in self.places)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that step together."""
        return tuple(part.optimizer for part in self.update.parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs."""
        return {
            "optimizers": list(self.places),
            "pieces": self.pieces,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "loss": self.mean_loss.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any], *, same_machine: bool) -> None:
        """Restore the state; the number of micro-batches is restored on the same machine only."""
        if same_machine:
            self.pieces = state["pieces"]
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.mean_loss.load_state_dict(state["loss"])


def check_gathered(turns: Iterable[Turn], step: int, batch: int) -> None:
    """Refuse to save where a resume, which continues after the last step, would lose batches."""
    for turn in turns:
        if turn.gathered and 0 < turn.gathered_from <= batch:
            names = ", ".join(type(optimizer).__name__ for optimizer in turn.optimizers)
            raise CheckpointError(
                f"{len(turn.gathered)} batches that {names} has gathered for a step would be "
                "lost in a resume, since another optimizer has stepped after them",
                where=f"step {step:,}, batch {batch:,} of the epoch",
                do="save where no optimizer waits for batches, or call "
                "loop.flush(compute, optimizer) first",
            )


class Turns:
    """All turns of a job: a turn of all optimizers, and a turn of each set that steps separately.

    Args:
        switch: holds the optimizers.
        clip_norm: largest total gradient norm, or None.
        clip_value: largest absolute gradient element, or None.

    Attributes:
        joint: the turn of all optimizers together.
    """

    def __init__(self, switch: Switch, clip_norm: float | None, clip_value: float | None) -> None:
        self._switch = switch
        self._clip = (clip_norm, clip_value)
        # A single step with numbers that are not finite stops the steps of all optimizers.
        self._flags: dict[torch.device, torch.Tensor] = {}
        self._across: Callable[[torch.Tensor], None] | None = None
        self._by_places: dict[tuple[int, ...], Turn] = {}
        self.joint = self.at(tuple(range(len(switch.optimizers))))

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._by_places.values())

    def of(self, optimizers: Optimizers | None) -> Turn:
        """Return the turn of some of the job's optimizers; None means all optimizers together.

        Raises:
            FlatoutError: an optimizer is not among the job's.
        """
        if optimizers is None:
            return self.joint
        known = {id(optimizer): place for place, optimizer in enumerate(self._switch.optimizers)}
        asked = as_tuple(optimizers)
        strangers = [type(o).__name__ for o in asked if id(o) not in known]
        if strangers or not asked:
            raise FlatoutError(
                f"a step of {strangers[0]}, which is not among the {len(known)} optimizers that "
                "prepare was given"
                if strangers
                else "a step of no optimizer",
                do="give prepare a list of all of them, and step the same objects",
            )
        return self.at(tuple(sorted({known[id(optimizer)] for optimizer in asked})))

    def at(self, places: tuple[int, ...]) -> Turn:
        """Return the turn of the optimizers at these indices in the job's list."""
        turn = self._by_places.get(places)
        if turn is None:
            update = Update(
                [self._switch.optimizers[place] for place in places],
                clip_norm=self._clip[0],
                clip_value=self._clip[1],
                flags=self._flags,
                rows=self._switch.rows,
            )
            update.across = self._across
            pieces = self.joint.pieces if self._by_places else 1
            scaler = self._scaler(places)
            turn = self._by_places[places] = Turn(places, update, scaler, pieces)
        return turn

    def sum_across(self, across: Callable[[torch.Tensor], None] | None) -> None:
        """Set the function `across`, which sums norms over ranks, once parameters are sharded."""
        self._across = across
        for turn in self:
            turn.update.across = across
            turn.update.refresh()

    def refresh(self) -> None:
        """Update all turns after a change of settings."""
        for turn in self:
            turn.update.refresh()
            scaler = self._scaler(turn.places)
            if scaler is None or turn.scaler is None:
                turn.scaler = scaler

    def _scaler(self, places: tuple[int, ...]) -> torch.amp.GradScaler | None:
        device = self._switch.device.type
        optimizers = [optimizer_adapter(self._switch.optimizers[place]) for place in places]
        asked = next(filter(None, (one.scaler(device) for one in optimizers)), None)
        is_half = self._switch.now.precision == "fp16"
        return torch.amp.GradScaler(device) if asked is None and is_half else asked
