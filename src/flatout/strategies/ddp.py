"""Data parallel training: every rank has the whole model and its part of each batch.

Each rank has the gradient of its part's loss *sum*. The sums are added up in buckets, while
backward still computes the gradients of earlier layers (Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training", 2020). One more, small bucket carries the
losses' sums and weights, so that the division by the weight comes after, exactly as on one rank,
without a collective of its own. It also tells which parameters any rank has used, and whether any
rank wants to stop, and is always added up exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flatout.errors import ModelError
from flatout.strategies.reductions import Beside, Flat
from flatout.world import Later, World

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

    def __init__(self, number: int, parameters: Sequence[torch.Tensor], name: str) -> None:
        self.parameters = list(parameters)
        self.name = name
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
        real = torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat
        layout = str([(tuple(view.shape), view.stride()) for view in self.views])
        self.whole = Flat(real, number, [_matrix(view) for view in self.views], layout)
        self.missing = len(self.parameters)
        self.sending: Later | None = None

    def send(self, world: World, reduction: Beside) -> None:
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
        self.sending = world.begun(reduction.begin(self.whole), self.name)


class Ddp:
    """Adds up the gradients of all ranks.

    Args:
        world: of this rank.
        parameters: what the optimiser trains, in the same order on every rank.
        reduction: how gradients are added up.
    """

    def __init__(self, world: World, parameters: Sequence[torch.Tensor], reduction: Beside) -> None:
        self.world, self.reduction = world, reduction
        self._of = parameters
        self.parameters = [p for p in parameters if p.requires_grad]
        self._buckets = _buckets(self.parameters)
        self._next = 0
        self._armed = self._is_weighed = False
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

    def arm(self, weight: torch.Tensor | float, scaler: torch.amp.GradScaler | None = None) -> None:
        """The next backward completes the gradients: send each bucket as soon as it is full.

        Before it, backwards of other pieces of the batch only add to this rank's own gradients.
        Buckets that were sent in this step already, before `disarm`, are not sent again.

        Args:
            weight: what this rank's part of the step weighs, in the unit of its loss.
            scaler: what the loss was scaled by, if it was.
        """
        if self.reduction.carries and not self._is_weighed:
            self._is_weighed = True
            number = torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)
            number += weight if scaler is None else scaler.scale(number + weight)
            self.reduction.weigh(self.world.sum(number, "weight of the step", later=True), number)
        self._armed = True
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def disarm(self) -> None:
        """That backward has failed, and the gradients are computed again from the beginning.

        What was sent is this rank's whole gradient of some parameters, and stays: no rank can take
        back its part of a sum.
        """
        self._armed = False

    @torch.no_grad()
    def finish(self, total: torch.Tensor | float, weight: torch.Tensor | float, vote: bool) -> Sums:
        """Wait for all sums, which become the gradients.

        Args:
            total: sum of this rank's losses.
            weight: sum of their weights.
            vote: whether this rank wants to stop.
        """
        self._armed = self._is_weighed = False
        device = self.parameters[0].device
        used = [float(p.grad is not None) for p in self.parameters]
        numbers = torch.tensor([0.0, 0.0, float(vote), *used], dtype=torch.float64, device=device)
        numbers[0], numbers[1] = total, weight
        for bucket in self._buckets[self._next :]:
            bucket.send(self.world, self.reduction)
        last = self.world.sum(numbers, "sum of the losses", later=True)
        assert last is not None
        for bucket in self._buckets:
            assert bucket.sending is not None
            self.world.until(bucket.sending)
            bucket.sending = None
        self.world.until(last)
        self._next = 0
        with self.world.within(last):
            # What this rank has used is used. Only where something is missing must it know more.
            self._give_out(used if all(used) else numbers[3:].tolist())
        return Sums(numbers[0], numbers[1], numbers[2])

    def _give_out(self, used: list[float]) -> None:
        """Gradients are views of the buckets; where no rank has one, there is none."""
        is_used = dict(zip(map(id, self.parameters), used, strict=True))
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                # Unused now, but an error of earlier steps may have come for it.
                has_one = is_used[id(parameter)] or (self.reduction.carries and bool(view.any()))
                parameter.grad = view if has_one else None

    def _on_ready(self, bucket: _Bucket) -> Any:
        def ready(_: torch.Tensor) -> None:
            if not self._armed:
                return
            bucket.missing -= 1
            # In one order on all ranks, whatever order their backwards come in.
            while self._next < len(self._buckets) and not self._buckets[self._next].missing:
                with torch.no_grad():
                    self._buckets[self._next].send(self.world, self.reduction)
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
    return [
        _Bucket(number, group, f"sum of gradients, bucket {number + 1} of {len(groups)}")
        for number, group in enumerate(groups)
    ]


def _matrix(view: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a gradient as it lies in memory; a vector is one column."""
    if not view.numel():
        return 0, 0
    real = view.numel() * (2 if view.is_complex() else 1)
    # The dimension with the longest stride; those of one element say nothing.
    strides = [(s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n > 1]
    rows = max(strides)[1] if strides else 1
    return rows, real // rows
