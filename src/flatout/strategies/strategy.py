"""The interface of a strategy around each step; by itself it does nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from flatout.data import Batch
from flatout.models import weights_of
from flatout.strategies.replicas import check_replicas
from flatout.world import World

Tensors = Sequence[torch.Tensor]


class Sums(NamedTuple):
    """Numbers that travel with the gradients, of one rank or of all ranks together.

    Attributes:
        total: sum of the losses.
        weight: sum of their weights.
        votes: how many ranks want to stop.
    """

    total: torch.Tensor | float
    weight: torch.Tensor | float
    votes: torch.Tensor | float


class Strategy:
    """Makes a step one of all ranks; this one is for a single rank, with nothing to add up.

    Around a step: `before_step`, `arm` before the backward that completes the gradients, `finish`
    behind it, and `after_step` when the weights have changed.

    Attributes:
        steps_apart: whether ranks step alone and are alike only where they meet: then losses are
            a rank's own, and all call `meet` before they compare, evaluate or save.
        meets_in_compute: whether ranks wait for each other within forward and backward: then all
            run as many, an evaluation's included.
        parts: into how many a batch is cut, where a rank claims parts as it comes to them, so that
            one that is slow takes fewer; 0 where each has its own part of each batch.
        takes_whole_batches: whether every rank is given each batch whole, of which the last counts.
        layout: what is on which rank, in words; "" where all have the same.
        micro_batches: into how many a batch is to be split, where it passes through stages; 0 for
            four for each.
        across: adds up numbers of what this rank holds of the gradients, in place, over all ranks
            that hold the rest; None where it holds them whole.
    """

    steps_apart = False
    meets_in_compute = False
    parts = 0
    takes_whole_batches = False
    layout = ""
    micro_batches = 0
    across: Callable[[torch.Tensor], None] | None = None

    def __init__(self) -> None:
        self._own = Sums(0.0, 0.0, 0.0)

    def begin(self) -> None:
        """The settings of the first step are there, and what is looked at before it is done."""

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """A step begins, before anything changes.

        Args:
            turn: which of the job's optimizers step, from 1.
            parameters: what they train, in the same order on every rank; the same object while it
                is the same.
        """

    def pass_on(
        self,
        compute: Callable[[Batch], Any],
        batch: Batch,
        loss: Callable[[Batch], torch.Tensor],
    ) -> tuple[int, int]:
        """Forward and backward of a whole batch, by all ranks; for those that take whole batches.

        Args:
            compute: forward and loss of a batch.
            batch: the same on every rank.
            loss: what a micro-batch adds to the loss, by `compute`; one rank calls it.

        Returns:
            how long this rank's forward and backward have computed, in ns.
        """
        raise NotImplementedError

    def arm(self, own: Sums, samples: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """The next backward completes the gradients.

        Args:
            own: this rank's part of the sums.
            samples: what the loss was divided by.
            scaler: what the loss was scaled by, if it was.
        """
        self._own = own

    def disarm(self) -> None:
        """Forget that backward: it has failed, and the gradients are computed again."""

    def finish(self) -> Sums:
        """Wait until the gradients are those of the step; what travelled with them."""
        return self._own

    def after_step(self) -> bool:
        """The weights have changed; returns whether a rank wants to stop, where ranks meet now."""
        return False

    def meet(self) -> bool:
        """Make all ranks alike; returns whether one wants to stop. All of them call it."""
        return False

    def open_section(self, steps: int) -> None:
        """Parts of so many steps may be claimed, numbered from 0; all ranks call it."""
        raise NotImplementedError

    def claim(self) -> tuple[int, int]:
        """The number of the next part, which no other rank gets, and how many are left then.

        In place of both, where none is left: -1, and before which the section has ended. Another
        thread may ask.
        """
        raise NotImplementedError

    def dropped(self) -> list[int]:
        """Ranks that were killed and without which the others go on, as the first one knows."""
        return []

    def used(self, number: int) -> None:
        """The next step is of this part."""

    def close_section(self) -> None:
        """End the section with the step of which parts were claimed."""

    def staleness(self) -> list[Counter[int]] | None:
        """Return each rank's numbers of gradients by age, in steps; None where none is old.

        All ranks call it.
        """
        return None

    def traffic(self) -> dict[str, Any]:
        """Return what this rank has sent in each step, for its Profile; empty if unknown."""
        return {}

    def late(self) -> list[int] | None:
        """Return for each rank the gradients that came too late; None where all wait for all.

        All ranks call it.
        """
        return None

    def whole_weights(self) -> AbstractContextManager[None]:
        """Within, a Keras model has its weights whole, to be read or changed; all ranks call it."""
        return nullcontext()

    def weights(self, model: nn.Module, *, kept: bool) -> dict[str, torch.Tensor]:
        """Everything that is saved of a model, by name, whole; all ranks call it.

        Args:
            model: of this rank.
            kept: whether this rank wants them; where not, tensors may be empty.
        """
        return weights_of(model)

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """An optimizer's state, whole, likewise."""
        return optimizer.state_dict()

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of an optimizer's whole state that this rank loads."""
        return state

    def renew(self) -> None:
        """Gradients may be of another kind from the next step on."""

    def check_alike(self, model: nn.Module, world: World, when: str) -> None:
        """Compare the weights that ranks have alike, as `check_replicas` does; all call it."""
        check_replicas(model, world, when)

    def own_state(self) -> dict[str, Any] | None:
        """Return what later steps need and a rank has for itself; None where there is nothing."""
        return None

    def load_own_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from what `own_state` gave on each rank; there may have been other ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps need besides weights and optimizers; the ranks have met."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, of this strategy or another one."""

    def close(self, error: BaseException | None = None) -> None:
        """Take off what was put on the model's parameters.

        Args:
            error: what has ended the training, where it has failed.
        """
