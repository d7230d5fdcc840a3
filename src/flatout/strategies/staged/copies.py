"""Copies of a pipeline: the ranks that have each stage, and the sum of gradients over copies.

Each copy of the model is on consecutive ranks, one stage on each, and takes its own samples of
every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flatout.strategies.buckets import Bucket, bucket_groups
from flatout.strategies.reductions import Reduction, reduction_among
from flatout.strategies.strategy import Tensors
from flatout.world import Group, World

# Maximum number of buckets of one set of optimizers, so that a bucket's number identifies the set.
_MOST_BUCKETS = 1 << 20
# Default number of micro-batches per stage: ranks are then idle for at most a fifth of the time.
_FOR_EACH_STAGE = 4


class Copies:
    """The ranks of a job as copies of a model in stages. All ranks create this.

    Attributes:
        stages, count: number of stages, and number of copies of each.
        stage, number: this rank's stage and copy, from 0. In the first copy, ranks and stages have
            the same numbers.
        pipeline: the ranks of this copy, one for each stage.
    """

    def __init__(self, world: World, stages: int) -> None:
        self._world = world
        self.stages, self.count = stages, world.size // stages
        self.number, self.stage = divmod(world.rank, stages)
        every = range(world.size)
        pipeline = world.among(*(every[first : first + stages] for first in every[::stages]))
        assert pipeline is not None
        self.pipeline: Group = pipeline
        # The ranks that have this stage, one for each copy.
        self._peers = world.among(*map(self.ranks_of, range(stages))) if self.count > 1 else None
        self._reduction: Reduction | None = None
        # By turn of the job's optimizers.
        self._buckets: dict[int, tuple[list[torch.Tensor], list[Bucket]]] = {}

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def words(self) -> str:
        """Describe the copies, such as "in 2 x 2 copies"; "" for one copy."""
        return f" in {self.stages} x {self.count} copies" if self.count > 1 else ""

    def last_rank(self, copy: int) -> int:
        return (copy + 1) * self.stages - 1

    def ranks_of(self, stage: int) -> range:
        return range(stage, self.stages * self.count, self.stages)

    def shares(self, rows: int) -> list[tuple[int, int]]:
        """Return the rows of each copy, from the first to before the second; some may have none."""
        ends = [rows * copy // self.count for copy in range(self.count + 1)]
        return list(pairwise(ends))

    @torch.no_grad()
    def sum_gradients(self, turn: int, parameters: Tensors) -> None:
        """Set gradients to the sums over all copies, or None if no copy has one."""
        # A single collective for the log, in which all ranks take part, whatever the size of a
        # stage.
        with self._world.within(self._world.begun(None, "sum of each stage's gradients")):
            buckets = self._buckets_of(turn, [p for p in parameters if p.requires_grad])
            sending = []
            for bucket in buckets:
                bucket.fill()
                bucket.more[:] = torch.tensor(bucket.used, dtype=bucket.more.dtype)
                sending.append(self._beside().begin(bucket.whole))
            for bucket, work in zip(buckets, sending, strict=True):
                work.wait()
                _give_out(bucket)

    def _buckets_of(self, turn: int, parameters: list[torch.Tensor]) -> list[Bucket]:
        known, buckets = self._buckets.get(turn, ([], []))
        if list(map(id, known)) == list(map(id, parameters)):
            return buckets
        groups = bucket_groups(parameters)
        first = (turn - 1) * _MOST_BUCKETS
        buckets = [
            Bucket(first + place, group, "", self._beside(), len(group))
            for place, group in enumerate(groups)
        ]
        self._buckets[turn] = parameters, buckets
        return buckets

    def _beside(self) -> Reduction:
        if self._reduction is None:
            assert self._peers is not None
            result = reduction_among(self._peers, self._world)
            self._reduction = result.started(torch.device("cpu"))
        return self._reduction

    @torch.no_grad()
    def average_statistics(self, modules: Iterable[nn.Module]) -> None:
        """Set the running statistics of BatchNorm in training to the mean over all copies."""
        result: list[torch.Tensor] = [
            statistic
            for module in modules
            if isinstance(module, _BatchNorm) and module.training
            for statistic in (
                module.running_mean,
                module.running_var,
                module.num_batches_tracked,
            )
            if statistic is not None and not statistic.is_meta
        ]
        with self._world.within(self._world.begun(None, "statistics of each stage's copies")):
            if result:
                flat = torch.cat([item.reshape(-1).double() for item in result])
                assert self._peers is not None
                dist.all_reduce(flat, group=self._peers.channel)
                _write(flat / self.count, result)

    def close(self) -> None:
        self._buckets.clear()
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None


def _give_out(bucket: Bucket) -> None:
    used = bucket.more.tolist()
    for parameter, view, use in zip(bucket.parameters, bucket.views, used, strict=True):
        parameter.grad = view if use else None


def _write(flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
    for part, tensor in zip(torch.split(flat, [item.numel() for item in into]), into, strict=True):
        tensor.copy_(part.view_as(tensor))


def micro_batches(asked: int, stages: int, rows: int, least: int = 1) -> int:
    return max(1, min(asked or _FOR_EACH_STAGE * stages, rows // least))


def others_to_try(stages: int, rows: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return other numbers of micro-batches to try: larger ones, and smaller ones, nearest first.

    The smallest number is chosen so that no stage keeps the activations of more than half a batch
    (with 1F1B).
    """
    usual = micro_batches(0, stages, rows)
    larger = [n for n in (2 * usual, 4 * usual) if n <= rows]
    smaller = [usual // 2] if usual // 2 >= 2 * stages else []
    return larger, smaller
