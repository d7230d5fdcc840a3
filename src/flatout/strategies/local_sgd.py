"""Ranks that step alone on their parts of the batches, and meet every so many steps.

When they meet, weights become those of the last meeting plus the mean change of all ranks: local
SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019). With an outer optimizer that
mean change is a gradient, for SGD with Nesterov momentum: DiLoCo (Douillard et al., "DiLoCo:
Distributed Low-Communication Training of Language Models", 2023).

The states of optimizers and the statistics of BatchNorm are averaged, too, so that behind a meeting
all ranks are alike, and a checkpoint of one holds all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from flatout.strategies.ddp import Sums
from flatout.strategies.reductions import Beside, Flat
from flatout.world import World

# Numbers that travel at a time, in a bucket of their own.
_LENGTH, _NUMBER = 1 << 22, 1 << 30

# Those of the paper.
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9

Tensors = Sequence[torch.Tensor]


class LocalSgd:
    """Takes the place of `Ddp` where ranks step alone.

    Args:
        world: of this rank.
        reduction: how what has changed is added up.
        weights: gives the parameters that are trained, in the same order on every rank.
        states: gives what is averaged as it is, likewise: the states of optimizers and buffers.
        every: how many steps are made between meetings.
        outer: whether the mean change is a gradient for an outer optimizer.

    Attributes:
        since: steps since the ranks have met.
    """

    def __init__(
        self,
        world: World,
        reduction: Beside,
        weights: Callable[[], Tensors],
        states: Callable[[], Tensors],
        *,
        every: int,
        outer: bool = False,
    ) -> None:
        self._world, self._reduction = world, reduction
        self._weights, self._states = weights, states
        self._every, self._outer = every, outer
        self._own = Sums(0.0, 0.0, 0.0)
        self._vote = 0.0
        self.since = 0
        # The weights of the last meeting, and the outer momentum by weight.
        self._anchors: list[torch.Tensor] = []
        self._velocities: list[torch.Tensor] = []
        self._flats: dict[torch.dtype, Flat] = {}

    def before_step(self) -> None:
        """A step begins, before anything changes."""
        if not self.since:
            self._anchors = [weight.detach().clone() for weight in self._weights()]

    def arm(self, own: Sums, samples: float, scaler: Any = None) -> None:
        """The next backward completes the gradients, of which these are the sums."""
        self._own = own

    def disarm(self) -> None:
        """That backward has failed."""

    def finish(self) -> Sums:
        """This rank's own sums: votes are counted when the ranks meet."""
        self._vote = max(self._vote, float(self._own.votes))
        return self._own._replace(votes=0.0)

    def after_step(self) -> int:
        """A step was made; returns how many ranks want to stop, where they meet now."""
        self.since += 1
        return self.meet() if self.since >= self._every else 0

    @torch.no_grad()
    def meet(self) -> int:
        """Make all ranks alike; all of them call it. Returns how many want to stop."""
        if not self.since:
            return 0
        self.since = 0
        votes = sum(self._world.gather(self._vote, "ranks that want to stop"))
        self._vote = 0.0
        weights = self._weights()
        self._mean_changes(weights)
        self._mean(self._states())
        self._anchors = []
        return int(votes)

    def _mean_changes(self, weights: Tensors) -> None:
        """Weights become those of the last meeting, moved by the mean change of all ranks."""
        if self._outer and not self._velocities:
            self._velocities = [torch.zeros_like(anchor) for anchor in self._anchors]
        floats = [n for n, weight in enumerate(weights) if weight.is_floating_point()]
        for n in floats:
            weights[n].sub_(self._anchors[n])
        self._mean([weights[n] for n in floats])
        for n in floats:
            change, anchor = weights[n].detach(), self._anchors[n]
            if self._outer:
                velocity = self._velocities[n].mul_(_OUTER_MOMENTUM).add_(change)
                change = _OUTER_RATE * (change + _OUTER_MOMENTUM * velocity)
            weights[n].copy_(anchor.add_(change))

    def _mean(self, tensors: Tensors) -> None:
        """Make tensors the mean of those of all ranks; counts stay as they are."""
        for dtype in (torch.float32, torch.float64):
            parts = [part for tensor in tensors for part in _parts_in(tensor, dtype)]
            for group in _grouped(parts):
                self._mean_of(group, dtype)

    def _mean_of(self, parts: Tensors, dtype: torch.dtype) -> None:
        if dtype not in self._flats:
            number = _NUMBER + len(self._flats)
            memory = self._reduction.memory(number, _LENGTH, dtype)
            self._flats[dtype] = Flat(memory, number)
        flat = self._flats[dtype]
        used = sum(map(len, parts))
        pieces = torch.split(flat.values[:used], [len(part) for part in parts])
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part)
        flat.values[used:] = 0
        flat.values.div_(self._world.size)
        begun = self._reduction.begin(flat)
        self._world.until(self._world.begun(begun, "mean of the ranks' weights"))
        for piece, part in zip(pieces, parts, strict=True):
            part.copy_(piece)

    def state_dict(self) -> dict[str, Any]:
        """What the next meeting needs besides the weights; the ranks have met."""
        return {"velocities": self._velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._velocities = [value.clone() for value in state["velocities"]]


def _parts_in(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Views of its numbers, where they travel in this dtype; each fits into a message."""
    travels = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    if tensor.is_floating_point() and tensor.dim() and travels is dtype:
        # As it lies in memory, in whatever format.
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        yield from torch.split(flat, _LENGTH)


def _grouped(parts: Tensors) -> Iterator[Tensors]:
    """As many as fit into a message together."""
    group: list[torch.Tensor] = []
    room = _LENGTH
    for part in parts:
        if len(part) > room:
            yield group
            group, room = [], _LENGTH
        group.append(part)
        room -= len(part)
    if group:
        yield group
