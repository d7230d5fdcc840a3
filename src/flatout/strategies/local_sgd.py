"""Ranks that step independently on their parts of the batches, and meet every few steps.

When they meet, weights become those of the last meeting plus the mean change over all ranks: local
SGD (Stich, "Local SGD Converges Fast and Communicates Little", 2019). With an outer optimizer the
mean change is used as a gradient for SGD with Nesterov momentum: DiLoCo (Douillard et al., "DiLoCo:
Distributed Low-Communication Training of Language Models", 2023).

The states of optimizers and the statistics of BatchNorm are averaged too. So all ranks are equal
after a meeting, and a checkpoint of one rank holds all. A mean leaves out each rank that had no
sample since the last mean; all ranks that had samples have the same weight in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.models import weights_of
from flatout.optim import optimizer_adapter
from flatout.strategies.reductions import Flat, Reduction
from flatout.strategies.strategy import Strategy, Sums, Tensors
from flatout.world import World

# _LENGTH, _LEAST: most and fewest values that are sent at a time, in buckets of their own. _NUMBER:
# number of the first of these buckets.
_LENGTH, _LEAST, _NUMBER = 1 << 22, 1 << 10, 1 << 30

# Rate and momentum of the outer optimizer in the DiLoCo paper.
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9


class LocalSgd(Strategy):
    """Lets ranks step independently, and makes them equal every few steps.

    Args:
        every: number of steps between meetings.
        outer: whether the mean change is a gradient for an outer optimizer.

    Attributes:
        since: steps since the last meeting.
    """

    steps_apart = True

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        reduction: Reduction,
        *,
        every: int,
        outer: bool = False,
    ) -> None:
        if not all(optimizer_adapter(optimizer).averages_state for optimizer in optimizers):
            raise ModelError(
                "world.strategy=local_sgd averages the state of torch's optimizers, and this one "
                "is Keras'",
                do="train with world.strategy=ddp, or give the Trainer an optimizer of torch",
            )
        super().__init__()
        self._world, self._model, self._optimizers = world, model, optimizers
        self.reduction = reduction
        self._every, self._outer = every, outer
        self._stepped: Tensors = ()
        self._vote = 0.0
        self.since = 0
        # Whether this rank had a sample since the last meeting, and the number of ranks that had
        # one.
        self._had_samples, self._counting = False, 0
        # The weights of the last meeting, and the outer momentum by weight.
        self._anchors: list[torch.Tensor] = []
        self._velocities: list[torch.Tensor] = []
        self._flats: dict[tuple[torch.dtype, int], Flat] = {}

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """Begin a step, before anything changes."""
        self._stepped = parameters
        if self.since:
            return
        weights = _trained(self._optimizers)
        self._anchors = [weight.detach().clone() for weight in weights]
        if self._outer:  # there may be more weights than before
            self._velocities += map(torch.zeros_like, self._anchors[len(self._velocities) :])

    def finish(self) -> Sums:
        """Return this rank's own sums. Votes are counted when the ranks meet."""
        self._vote = max(self._vote, float(self._own.votes))
        if self._own.weight:
            self._had_samples = True
        else:  # no sample of this rank counts
            for parameter in self._stepped:
                parameter.grad = None
        return self._own._replace(votes=0.0)

    def after_step(self) -> bool:
        """Count a step, meet if it is due, and return whether a rank wants to stop."""
        self.since += 1
        return self.meet() if self.since >= self._every else False

    @torch.no_grad()
    def meet(self) -> bool:
        """Make all ranks equal, and return whether one wants to stop. All ranks call this."""
        if not self.since:
            return False
        self.since = 0
        weights = _trained(self._optimizers)
        own = (self._vote, self._had_samples)
        told = self._world.gather(own, "ranks that want to stop or had samples")
        votes, self._counting = (sum(values) for values in zip(*told, strict=True))
        self._mean_changes(weights)
        self._mean(_kept_beside(self._model, self._optimizers))
        self._anchors = []
        self._vote, self._had_samples = 0.0, False
        return bool(votes)

    def _mean_changes(self, weights: Tensors) -> None:
        floats = [n for n, weight in enumerate(weights) if weight.is_floating_point()]
        for n in floats:
            weights[n].sub_(self._anchors[n])
        self._mean([weights[n] for n in floats])
        for n in floats:
            weights[n].copy_(self._move(n, weights[n].detach()))

    def _move(self, number: int, change: torch.Tensor) -> torch.Tensor:
        if self._outer:
            velocity = self._velocities[number].mul_(_OUTER_MOMENTUM).add_(change)
            change = _OUTER_RATE * (change + _OUTER_MOMENTUM * velocity)
        return self._anchors[number].add_(change)

    def _mean(self, tensors: Tensors) -> None:
        for dtype, parts in _messages(tensors):
            self._mean_of(parts, dtype)

    def _mean_of(self, parts: Tensors, dtype: torch.dtype) -> None:
        used, key = sum(map(len, parts)), (dtype, _length_of(parts))
        if key not in self._flats:
            number = _NUMBER + len(self._flats)
            self._flats[key] = Flat(self.reduction.memory(number, key[1], dtype), number)
        flat = self._flats[key]
        pieces = torch.split(flat.values[:used], [len(part) for part in parts])
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part)
        flat.values[used:] = 0
        if self._had_samples or not self._counting:
            flat.values.div_(self._counting or self._world.size)
        else:
            flat.values.zero_()
        begun = self.reduction.begin(flat)
        self._world.until_done(self._world.begun(begun, "mean of the ranks' weights"))
        for piece, part in zip(pieces, parts, strict=True):
            part.copy_(piece)

    def traffic(self) -> dict[str, Any]:
        """Return the bytes that one average sends."""
        return {"bytes_per_average": bytes_per_average(self._model, self._optimizers)}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next meeting needs in addition to weights. The ranks have met."""
        return {"velocities": self._velocities}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the output of `state_dict`, of this strategy or another one."""
        self._velocities = [value.clone() for value in state.get("velocities", ())]

    def close(self, error: BaseException | None = None) -> None:
        """End the reduction."""
        self.reduction.close()


def bytes_per_average(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the bytes that a rank sends when all weights are averaged."""
    sent = [*_messages(_trained(optimizers)), *_messages(_kept_beside(model, optimizers))]
    return sum(dtype.itemsize * _length_of(parts) for dtype, parts in sent)


def _trained(optimizers: Sequence[torch.optim.Optimizer]) -> Tensors:
    return [p for o in optimizers for g in o.param_groups for p in g["params"]]


def _kept_beside(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Tensors:
    trained = _trained(optimizers)
    known = {parameter.data_ptr() for parameter in trained}
    others = [w for w in weights_of(model).values() if w.data_ptr() not in known]
    kept = [
        value
        for optimizer in optimizers
        for parameter in trained
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if torch.is_tensor(value)
    ]
    return [*others, *kept]


def _messages(tensors: Tensors) -> Iterator[tuple[torch.dtype, Tensors]]:
    for dtype in (torch.float32, torch.float64):
        for parts in _grouped([part for tensor in tensors for part in _parts_in(tensor, dtype)]):
            yield dtype, parts


def _parts_in(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    travels = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    if tensor.is_floating_point() and tensor.dim() and travels is dtype:
        # In memory order, whatever the memory format.
        flat = tensor.detach().as_strided((tensor.numel(),), (1,))
        yield from torch.split(flat, _LENGTH)


def _length_of(parts: Tensors) -> int:
    used = sum(map(len, parts))
    step = 1 << max(0, used.bit_length() - 4)
    return max(_LEAST, -(-used // step) * step)


def _grouped(parts: Tensors) -> Iterator[Tensors]:
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
