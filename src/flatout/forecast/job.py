"""Facts about a job, its machines, and the steps that were timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Strategy = Literal["ddp", "fsdp", "parameter_server", "local_sgd"]
Reduction = Literal["all_reduce", "nccl", "shared", "ring", "to_one", "hierarchical"]
Compression = Literal["off", "fp16", "bf16", "powersgd"]
Range = tuple[float, float]
GPU_SUMS: Range = (1e9, 1e11)
"""Range of bytes per second at which a GPU sums, including copies from and to the network."""
_BUCKET_BYTES = 25 * 2**20
_FEWEST_STEPS = 10


class Bucket(NamedTuple):
    """Gradients that are sent together.

    Attributes:
        bytes: total bytes of these gradients.
        ready: share of the backward pass, 0 to 1, after which these gradients are complete.
    """

    bytes: float
    ready: float


def cut(bytes: float) -> tuple[Bucket, ...]:
    """Return buckets of 25 MB that get ready at equal intervals, for a job of unknown buckets."""
    if not bytes:
        return ()
    count = max(1, round(bytes / _BUCKET_BYTES))
    return tuple(Bucket(bytes / count, (place + 1) / count) for place in range(count))


class Spread:
    """Variation of a rank's step times: as measured, or a normal distribution if not measured."""

    def __init__(self, steps: Sequence[float] | None = None) -> None:
        self._steps: Floats | None = None
        if steps is not None and len(steps) >= _FEWEST_STEPS:
            values = np.asarray(steps, float)
            self._steps = values / values.mean()

    @property
    def is_measured(self) -> bool:
        return self._steps is not None

    def excess(self, ranks: int) -> float:
        """Return the expected maximum of the ranks' step times minus their mean.

        The unit is the mean step time where the variation is measured, otherwise a standard
        deviation.
        """
        if self._steps is None:
            return normal_maximum(ranks)
        return expected_maximum(self._steps, ranks) - 1.0


def expected_maximum(values: Sequence[float] | Floats, draws: int) -> float:
    """Return the exact mean of the maximum of `draws` draws with replacement.

    The i-th smallest of n values is the maximum with probability (i/n)^N - ((i-1)/n)^N.
    """
    ordered = np.sort(np.asarray(values, float))
    below = np.linspace(0.0, 1.0, len(ordered) + 1) ** draws
    return float(np.diff(below) @ ordered)


@cache
def normal_maximum(draws: int) -> float:
    """Return the expected maximum of normal draws (Blom, "Statistical Estimates", 1958)."""
    return 0.0 if draws == 1 else NormalDist().inv_cdf((draws - 0.375) / (draws + 0.25))


@dataclass(frozen=True)
class Job:
    """The work of a step: the computation and the communication of the ranks.

    A field with the name of a setting of `world` has the setting's value; `reduction` may also be
    "nccl", the ring all-reduce of NCCL.

    Attributes:
        buckets: gradients, in the order in which they are sent.
        batch: number of samples in one rank's step, for which times are given.
        backward: share of a step's computation time in the backward pass.
        served: the way in which gradients reach the servers. "hosts": each host sends the sum of
            its ranks' gradients, as gradients get ready. "ranks": each rank sends its own gradients
            after its backward pass, as for Flatout's asynchronous servers. "reduced": after the
            backward pass each server's part of the gradients is reduced to the server, and its
            weights are broadcast, as for Flatout's synchronous servers. Two further ways are for
            servers on separate hosts: "towers" is like "hosts", but after the backward pass, as for
            Flatout's synchronous servers; "apart" is like "ranks".
        largest: bytes of the largest tensor that a server holds whole; 0 where tensors are split
            evenly among servers.
        row_bytes: bytes per sample of the embedding table rows that a rank uses.
        sync_every: number of steps between two averages of weights in local SGD.
        averaged: bytes that local SGD averages at a time; 0 means as many bytes as the gradients.
        spread: variation of the times of a rank's steps.
    """

    buckets: tuple[Bucket, ...]
    batch: float
    backward: float = 2 / 3
    strategy: Strategy = "ddp"
    reduction: Reduction = "all_reduce"
    compression: Compression = "off"
    powersgd_rank: int = 4
    servers: int = 1
    served: Literal["hosts", "ranks", "reduced", "towers", "apart"] = "hosts"
    largest: float = 0.0
    row_bytes: float = 0.0
    tables: Literal["sharded", "replicated"] = "sharded"
    sync_every: int = 32
    averaged: float = 0.0
    spread: Spread = field(default_factory=Spread)

    @property
    def bytes(self) -> float:
        return sum(bucket.bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Shape:
    """Number of ranks and samples of a step.

    Attributes:
        batch: number of samples in one micro-batch of one rank.
        accumulated: number of micro-batches between two gradient syncs.
        servers: number of parameter servers; None means as in the job.
        silent: whether ranks send nothing, as where the ranks of one host were timed simultaneously
            without communication.
    """

    hosts: int
    per_host: int
    batch: float
    accumulated: int = 1
    servers: int | None = None
    silent: bool = False

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def samples(self) -> float:
        return self.ranks * self.batch * self.accumulated


@dataclass(frozen=True)
class StepTime:
    """The median seconds of timed steps; `noise` is its standard deviation as a share."""

    shape: Shape
    seconds: float
    noise: float = 0.015


@dataclass(frozen=True)
class ReductionTime:
    """Median seconds of a reduction that was timed without steps, with `bytes` of each rank."""

    shape: Shape
    reduction: Reduction
    bytes: float
    seconds: float
    noise: float = 0.05


@dataclass(frozen=True)
class Prior:
    """Range of each unknown value of the model, before timed steps narrow the range.

    Attributes:
        nic: bytes per second of a host's link in one direction, or None if unknown.
        rtt: seconds of a round trip between hosts.
        inside: bytes per second between two ranks of one host.
        summing: bytes per second at which a rank sums, including copies from and to the network.
        fixed: share of a step's time that does not shrink with the batch.
        contention: relative slow-down of a step by a second rank on the same host.
        power: exponent with which `contention` grows with further ranks: 0 means no growth, 1
            linear growth.
        spread: standard deviation of a rank's step times, as a share of their mean. If `Job.spread`
            is measured: the share of that variation which differs between ranks.
        hidden: share of the backward pass that communication can overlap with, see
            `collectives.exposed`.
        input: samples per second that a host can read; None if input is no limit.
        total_input: samples per second that all hosts together can read; None if that is no limit.
    """

    nic: Range | None = None
    rtt: Range = (2e-5, 5e-4)
    inside: Range = (5e8, 2e10)
    summing: Range = (3e8, 3e10)
    fixed: Range = (0.0, 0.4)
    contention: Range = (0.001, 0.3)
    power: Range = (0.0, 1.0)
    spread: Range = (0.002, 0.05)
    hidden: Range = (0.0, 1.0)
    input: Range | None = None
    total_input: Range | None = None
