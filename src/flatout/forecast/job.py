"""What is known of a job, of its machines, and of steps that were timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flatout.forecast.overlap import Bucket
from flatout.forecast.stragglers import Spread

Strategy = Literal["ddp", "fsdp", "parameter_server", "local_sgd"]
Reduction = Literal["all_reduce", "nccl", "shared", "ring", "to_one", "hierarchical"]
Compression = Literal["off", "fp16", "bf16", "powersgd"]
Range = tuple[float, float]
GPU_SUMS: Range = (1e9, 1e11)
"""What a GPU adds up, and copies from and to the network, in bytes per second."""


@dataclass(frozen=True)
class Job:
    """The work of a step: the computing and the communication of the ranks.

    Attributes:
        buckets: gradients, in the order in which they are sent.
        batch: samples of one rank's step to which times refer.
        backward: the backward pass as a share of a step's computing.
        strategy: as `world.strategy`.
        reduction: as `world.reduction`; "nccl" is the ring all-reduce of NCCL.
        compression: as `world.compression`.
        powersgd_rank: the rank of the matrices of PowerSGD.
        servers: the number of parameter servers.
        served: the way of gradients to the servers. "hosts": each host sends the sum of its ranks,
            as gradients get ready. "ranks": each rank sends its own gradients after its backward
            pass, as for Flatout's asynchronous servers. "reduced": after the backward pass each
            server's share is reduced to the server, and its weights are broadcast, as for Flatout's
            synchronous servers. Two ways lead to servers on hosts of their own. "towers" is "hosts"
            after the backward pass, as for Flatout's synchronous servers, and "apart" is "ranks".
        largest: bytes of the largest tensor that a server holds whole; 0 where shares are equal.
        row_bytes: bytes per sample of the table rows that a rank uses.
        tables: whether every rank holds these tables, as `world.tables`.
        sync_every: steps between two averages of local SGD.
        fragments: the number of fragments of local SGD.
        averaged: bytes that local SGD averages at a time; 0 is as many as the gradients have.
        spread: the spread of the times of a rank's steps.
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
    fragments: int = 1
    averaged: float = 0.0
    spread: Spread = field(default_factory=Spread)

    @property
    def bytes(self) -> float:
        """Of all gradients."""
        return sum(bucket.bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Shape:
    """Ranks that take a step.

    Attributes:
        hosts: how many.
        per_host: ranks on each.
        batch: samples of one rank between two gradient syncs, of one micro-batch.
        accumulated: micro-batches between two syncs.
        servers: parameter servers; None is as the job says.
        silent: whether nothing is sent, as where ranks on one host were timed beside each other.
    """

    hosts: int
    per_host: int
    batch: float
    accumulated: int = 1
    servers: int | None = None
    silent: bool = False

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.per_host

    @property
    def samples(self) -> float:
        """Of a step, of all ranks."""
        return self.ranks * self.batch * self.accumulated


@dataclass(frozen=True)
class StepTime:
    """Steps that were timed.

    Attributes:
        shape: of what took them.
        seconds: of a step, the median.
        noise: by how much it may be wrong, 0.01 is 1%: one standard deviation.
    """

    shape: Shape
    seconds: float
    noise: float = 0.015


@dataclass(frozen=True)
class ReductionTime:
    """A reduction that was timed alone.

    Attributes:
        shape: of the ranks.
        reduction: as of a Job.
        bytes: of each rank's tensor.
        seconds: that it took, the median.
        noise: as of a StepTime.
    """

    shape: Shape
    reduction: Reduction
    bytes: float
    seconds: float
    noise: float = 0.05


@dataclass(frozen=True)
class Prior:
    """What the terms of a step may be before steps were timed: from, to.

    Attributes:
        nic: bytes per second of a host's link, in one direction; None where none is known.
        rtt: seconds, of a message between hosts.
        inside: bytes per second between ranks of a host.
        summing: bytes per second that a rank adds up, and copies from and to the network.
        fixed: share of a step that does not get less with the batch.
        contention: by how much a step slows down with the second rank on a host.
        power: how that grows with further ranks: 0 not at all, 1 with each as with the second.
        spread: standard deviation of a rank's steps, as a share; where it is measured, the share
            of it that is not the same on all ranks.
        hidden: see `overlap.exposed`.
        input: samples per second that a host can read; None where input is no limit.
        total_input: that all hosts together can read; None likewise.
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
