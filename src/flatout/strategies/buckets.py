"""Gradients of some parameters in one piece of memory, in which ranks sum them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatout.strategies.reductions import Flat, Reduction
from flatout.world import PendingCollective, World

# _FIRST_BYTES, _BUCKET_BYTES: bytes of the first and of later buckets, as in torch's
# DistributedDataParallel. The first one is small, so that sending begins early.
_FIRST_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
# Use of a parameter on a rank. UNUSED: no gradient. DENSE, SPARSE: a gradient with all rows, or
# with some rows.
UNUSED, DENSE, SPARSE = 0.0, 1.0, float(1 << 20)  # of fewer ranks, so that sums tell them apart


class Bucket:
    def __init__(
        self,
        number: int,
        parameters: Sequence[torch.Tensor],
        name: str,
        reduction: Reduction,
        more: int = 0,
    ) -> None:
        self.parameters = list(parameters)
        self.used = [UNUSED] * len(self.parameters)
        self.name = name
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self.flat = reduction.memory(number, sum(sizes) + more, first.dtype, first.device)
        self.more = self.flat[sum(sizes) :]
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter, size in zip(self.parameters, sizes, strict=True):
            # In the parameter's own memory order, so that copies are sequential in memory.
            own = torch.empty_like(parameter, memory_format=torch.preserve_format)
            self.views.append(self.flat.as_strided(own.size(), own.stride(), start))
            start += size
        real = torch.view_as_real(self.flat).view(-1) if self.flat.is_complex() else self.flat
        layout = str([(tuple(view.shape), view.stride()) for view in self.views])
        self.whole = Flat(real, number, [_matrix(view) for view in self.views], layout)
        self.missing = len(self.parameters)
        self.sending: PendingCollective | None = None
        self.ready_ns = 0

    def note_used(self) -> None:
        self.used = [_use_of(parameter) for parameter in self.parameters]

    def fill(self) -> None:
        """Copy this rank's gradients into the bucket; a missing gradient counts as zero."""
        self.note_used()
        views, gradients = [], []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                view.zero_()
                continue
            views.append(view)
            gradients.append(parameter.grad)
        if views:
            torch._foreach_copy_(views, gradients)

    def send(self, world: World, reduction: Reduction) -> None:
        self.fill()
        self.sending = world.begun(reduction.begin(self.whole), self.name)


def _use_of(parameter: torch.Tensor) -> float:
    if parameter.grad is None:
        return UNUSED
    return DENSE if parameter.grad.layout is torch.strided else SPARSE


def bucket_groups(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the parameters of each bucket, the last ones first: backward reaches these first."""
    groups: list[list[torch.Tensor]] = []
    room = 0
    for parameter in reversed(parameters):
        last = groups[-1][-1] if groups else None
        fits = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not fits or room <= 0:
            room = _BUCKET_BYTES if groups else _FIRST_BYTES
            groups.append([])
        # The parameter that fills a bucket still goes into it. In a bucket of its own, more bytes
        # would have to wait for the end of backward.
        groups[-1].append(parameter)
        room -= parameter.numel() * parameter.element_size()
    return groups


def _matrix(view: torch.Tensor) -> tuple[int, int]:
    if not view.numel():
        return 0, 0
    real = view.numel() * (2 if view.is_complex() else 1)
    # The dimension with the longest stride. Dimensions of one element do not count.
    strides = [(s, n) for s, n in zip(view.stride(), view.shape, strict=True) if n > 1]
    rows = max(strides)[1] if strides else 1
    return rows, real // rows
