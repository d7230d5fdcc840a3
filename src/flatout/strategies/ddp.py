"""Data parallel training: every rank has the whole model and its part of each batch.

Each rank has the gradient of its part's loss *sum*. The sums are added up in buckets, while
backward still computes the gradients of earlier layers (Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", 2020). One more, small bucket carries the
losses' sums and weights, so that the division by the weight comes after, exactly as on one rank,
without a collective of its own. It also tells which parameters any rank has used, and whether any
rank wants to stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flatout.errors import ModelError
from flatout.world import World

# As in torch's DistributedDataParallel: the first bucket is small, so that sending begins early.
_FIRST_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20


class Sums(NamedTuple):
    """What the small bucket brings: of all ranks together.

    Attributes:
        total: sum of the losses.
        weight: sum of their weights.
        votes: how many ranks want to stop.
    """

    total: torch.Tensor
    weight: torch.Tensor
    votes: torch.Tensor


class _Bucket:
    """Gradients of some parameters in one piece of memory."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter, size in zip(self.parameters, sizes, strict=True):
            # In the parameter's own memory order, so that copies run through memory in one go.
            own = torch.empty_like(parameter, memory_format=torch.preserve_format)
            self.views.append(self.flat.as_strided(own.size(), own.stride(), start))
            start += size
        self.missing = len(self.parameters)
        self.sending: Any = None

    def send(self, world: World) -> None:
        """Begin to add up; what has no gradient on this rank counts as zero."""
        views, gradients = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
                continue
            if parameter.grad.layout is not torch.strided:
                raise ModelError(
                    "ranks cannot add up sparse gradients",
                    do="use Embedding(sparse=False), or train on one rank",
                )
            views.append(view)
            gradients.append(parameter.grad)
        if views:
            torch._foreach_copy_(views, gradients)
        self.sending = world.sum(self.flat, later=True)


class Ddp:
    """Adds up the gradients of all ranks.

    Args:
        world: of this rank.
        parameters: what the optimiser trains, in the same order on every rank.
    """

    def __init__(self, world: World, parameters: Sequence[torch.Tensor]) -> None:
        self.world = world
        self._of = parameters
        self.parameters = [p for p in parameters if p.requires_grad]
        self._buckets = _buckets(self.parameters)
        self._next = 0
        self._armed = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._on_ready(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def is_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether this is for these parameters as they lie in memory now."""
        if parameters is not self._of:
            return False
        return all(
            parameter.stride() == view.stride()
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        )

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def arm(self) -> None:
        """The next backward completes the gradients: send each bucket as soon as it is full.

        Before it, backwards of other pieces of the batch only add to this rank's own gradients.
        """
        self._armed = True
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    @torch.no_grad()
    def finish(self, total: torch.Tensor | float, weight: torch.Tensor | float, vote: bool) -> Sums:
        """Wait for all sums, which become the gradients.

        Args:
            total: sum of this rank's losses.
            weight: sum of their weights.
            vote: whether this rank wants to stop.
        """
        self._armed = False
        device = self.parameters[0].device
        used = [float(p.grad is not None) for p in self.parameters]
        numbers = torch.tensor([0.0, 0.0, float(vote), *used], dtype=torch.float64, device=device)
        numbers[0], numbers[1] = total, weight
        for bucket in self._buckets[self._next :]:
            bucket.send(self.world)
        last = self.world.sum(numbers, later=True)
        for bucket in self._buckets:
            self.world.until(bucket.sending)
            bucket.sending = None
        self.world.until(last)
        # What this rank has used is used. Only where something is missing must it know more.
        self._give_out(used if all(used) else numbers[3:].tolist())
        return Sums(numbers[0], numbers[1], numbers[2])

    def _give_out(self, used: list[float]) -> None:
        """Gradients are views of the buckets; where no rank has one, there is none."""
        is_used = dict(zip(map(id, self.parameters), used, strict=True))
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if is_used[id(parameter)] else None

    def _on_ready(self, bucket: _Bucket) -> Any:
        def ready(_: torch.Tensor) -> None:
            if not self._armed:
                return
            bucket.missing -= 1
            # In one order on all ranks, whatever order their backwards come in.
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                with torch.no_grad():
                    self._buckets[self._next].send(self.world)
                self._next += 1

        return ready


def _buckets(parameters: Sequence[torch.Tensor]) -> list[_Bucket]:
    """The last parameters first, for backward reaches them first."""
    groups: list[list[torch.Tensor]] = []
    room = 0
    for parameter in reversed(parameters):
        size = parameter.numel() * parameter.element_size()
        last = groups[-1][-1] if groups else None
        fits = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if fits and size <= room:
            groups[-1].append(parameter)
            room -= size
        else:
            room = (_BUCKET_BYTES if groups else _FIRST_BYTES) - size
            groups.append([parameter])
    return [_Bucket(group) for group in groups]
