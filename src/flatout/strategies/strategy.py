"""The interface of a strategy around each step. The base class is for a single rank."""

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
    """Numbers that are summed with the gradients, of one rank or of all ranks.

    Attributes:
        total: sum of the losses.
        weight: sum of the losses' weights.
        votes: number of ranks that want to stop.
    """

    total: torch.Tensor | float
    weight: torch.Tensor | float
    votes: torch.Tensor | float


class Strategy:
    """Makes a step common to all ranks. The base class is for a single rank, with nothing to sum.

    Calls around a step: `before_step`, `arm` before the backward that completes the gradients,
    `finish` after it, and `after_step` when the weights have changed.

    Attributes:
        steps_apart: whether ranks step independently and are equal only where they meet. Then
            losses are a rank's own, and all ranks call `meet` before they compare, evaluate or
            save.
        meets_in_compute: whether ranks wait for each other within forward and backward. Then all
            ranks run the same number of them, also in an evaluation.
        parts: number of parts of a batch that ranks claim one by one, so that a slow rank takes
            fewer; 0 if each rank has its own part of each batch.
        takes_whole_batches: whether every rank gets each batch whole, of which the last rank
            counts.
        layout: description of the parts on each rank, or "" if all ranks have the same.
        micro_batches: number of micro-batches of a batch that passes through stages; 0 for four for
            each stage.
        across: sums numbers of this rank's part of the gradients, in place, over all ranks that
            hold the other parts; None if this rank holds them whole.
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
        """Begin, when the settings of the first step, and what is checked before it, are known."""

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """Begin a step, before anything changes.

        Args:
            turn: the number, from 1, of the set of the job's optimizers that steps.
            parameters: the parameters of these optimizers, in the same order on every rank; the
                same object while they are the same.
        """

    def pass_on(
        self,
        compute: Callable[[Batch], Any],
        batch: Batch,
        loss: Callable[[Batch], torch.Tensor],
    ) -> tuple[int, int]:
        """Run forward and backward of a whole batch, on all ranks (see `takes_whole_batches`).

        Args:
            compute: forward and loss of a batch.
            batch: the batch, the same on every rank.
            loss: returns a micro-batch's part of the loss, by `compute`; one rank calls it.

        Returns:
            nanoseconds that this rank's forward and backward have computed.
        """
        raise NotImplementedError

    def arm(self, own: Sums, samples: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """Note that the next backward completes the gradients.

        Args:
            own: this rank's part of the sums.
            samples: the divisor of the loss.
            scaler: the scaler of the loss, if any.
        """
        self._own = own

    def disarm(self) -> None:
        """Forget that backward, which has failed; the gradients are computed again."""

    def finish(self) -> Sums:
        """Wait until the gradients are those of the step, and return the sums."""
        return self._own

    def after_step(self) -> bool:
        """Note that weights have changed, meet if due, and return whether a rank wants to stop."""
        return False

    def meet(self) -> bool:
        """Make all ranks equal, and return whether one wants to stop. All ranks call this."""
        return False

    def open_section(self, steps: int) -> None:
        """Allow claims of the parts of `steps` steps, numbered from 0. All ranks call this."""
        raise NotImplementedError

    def claim(self) -> tuple[int, int]:
        """Return the number of the next part, for this rank only, and the count of parts left.

        If no part is left, return -1 and the number before which the section has ended. Other
        threads may call this.
        """
        raise NotImplementedError

    def dropped(self) -> list[int]:
        """Return the ranks that were killed and dropped, as the first rank knows them."""
        return []

    def used(self, number: int) -> None:
        """Set the part of the next step."""

    def close_section(self) -> None:
        """End the section after the last step of which a part was claimed."""

    def staleness(self) -> list[Counter[int]] | None:
        """Return each rank's numbers of gradients by age, in steps, or None if none is old.

        All ranks call this.
        """
        return None

    def traffic(self) -> dict[str, Any]:
        """Return what this rank has sent in each step, for its Profile; empty if unknown."""
        return {}

    def late(self) -> list[int] | None:
        """Return for each rank the number of late gradients, or None if ranks wait for each other.

        All ranks call this.
        """
        return None

    def whole_weights(self) -> AbstractContextManager[None]:
        """Give a Keras model whole weights in the block, to read or change. All ranks call this."""
        return nullcontext()

    def weights(self, model: nn.Module, *, kept: bool) -> dict[str, torch.Tensor]:
        """Return all tensors that are saved of a model, by name, whole. All ranks call this.

        Args:
            kept: whether this rank needs them; if not, tensors may be empty.
        """
        return weights_of(model)

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """Return an optimizer's whole state; the arguments are those of `weights`."""
        return optimizer.state_dict()

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the part of an optimizer's whole state that this rank loads."""
        return state

    def renew(self) -> None:
        """Note that gradients may be of another kind from the next step on."""

    def check_alike(self, model: nn.Module, world: World, when: str) -> None:
        """Compare the weights that ranks have in common (`check_replicas`). All ranks call this."""
        check_replicas(model, world, when)

    def own_state(self) -> dict[str, Any] | None:
        """Return the state that later steps need and that differs between ranks, or None."""
        return None

    def load_own_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the output of `own_state` of each rank; the number of ranks may have changed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps need besides weights and optimizers. The ranks have met."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the output of `state_dict`, of this strategy or another one."""

    def close(self, error: BaseException | None = None) -> None:
        """Undo the changes on the model's parameters.

        Args:
            error: the error that has ended the training, if any.
        """
