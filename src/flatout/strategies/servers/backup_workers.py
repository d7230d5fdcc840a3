"""A parameter server that steps without the slowest few of its workers.

Chen et al., "Revisiting Distributed Synchronous SGD", 2016. A step is made once enough gradients of
the present weights have arrived; it takes their mean. A later gradient belongs to old weights: it
is dropped, and its worker continues with the present weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatout.strategies.servers.server import Server
from flatout.strategies.servers.share import Push, Share


class _Step:
    """The gradients that have arrived for the next step of an optimizer's share.

    Attributes:
        came: number of these gradients.
    """

    def __init__(self, share: Share) -> None:
        self._sum = torch.zeros_like(share.values)
        self.forget()

    def forget(self) -> None:
        self.came = 0
        self._weight = 0.0
        self._used: list[bool] = []
        self._sum.zero_()

    def add(self, worker: int, push: Push, gradient: torch.Tensor) -> None:
        self.came += 1
        self._weight += push.weight
        self._used = [a or b for a, b in zip(self._used or push.used, push.used, strict=True)]
        self._sum.add_(gradient, alpha=push.weight)
        self._latest = worker, push

    def make(self, share: Share) -> None:
        worker, push = self._latest
        share.step(worker, push._replace(used=self._used), self._sum.div_(self._weight))
        self.forget()


class SpareServer(Server):
    """Steps with the mean gradient of all workers but the slowest."""

    def __init__(self, shares: Sequence[Share], workers: int, spare: int, timeout_s: float) -> None:
        super().__init__(shares, workers, None, timeout_s)
        self._enough = workers - spare
        self._steps = [_Step(share) for share in shares]
        self.late = [0] * workers

    @torch.no_grad()
    def _take(self, worker: int, push: Push, gradient: torch.Tensor) -> None:
        """Add a gradient to the next step and wait for that step, or drop a late gradient."""
        share, step = self.shares[push.place], self._steps[push.place]
        if not share.is_current(worker):
            self.late[worker] += 1
            return
        version = share.version
        step.add(worker, push, gradient)
        self._step_if_due()
        self._wait_for_others(lambda: share.version > version)

    def _step_if_due(self) -> None:
        # Some workers may have no samples left.
        enough = min(self._enough, len(self._clocks))
        for share, step in zip(self.shares, self._steps, strict=True):
            if step.came and step.came >= enough:
                step.make(share)
                self._changed.notify_all()

    @torch.no_grad()
    def leave(self, worker: int) -> None:
        """Note that a worker has ended or has no step left, so no step waits for its gradients."""
        with self._changed:
            super().leave(worker)
            self._step_if_due()
