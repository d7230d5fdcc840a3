"""Series of training speed with a physics other than the model's: other laws and collectives.

A step is simulated event by event. Layers have uneven sizes and costs. Gradients are sent in
buckets while layers are computed, and slow them down. Collectives are trees, or rings whose latency
adds up hop by hop. Bandwidth falls with small messages and with many hosts. The slowest rank on
uneven hosts is lognormal. Devices get no faster below some batch, and hosts limit the rate of
input. Rates are measured with 1 to 5% of noise. The model gets the same facts as of a published
series: bytes, the line rate of the network, sizes and rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.forecast.job import GPU_SUMS, Bucket, Job, Prior, Shape, cut
from forecast_series import NETWORKS, Series

Rng = np.random.Generator


def between(rng: Rng, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform, so that each doubling is equally likely."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


@dataclass(frozen=True)
class System:
    """The truth about a cluster."""

    per_host: int
    line: float
    network: str
    efficiency: float
    hop: float
    inner_hop: float
    inner: float
    half: float
    congestion: float
    rack: int
    beyond_rack: float
    is_tree: bool
    crowding: float
    uneven_ranks: float
    uneven_hosts: float

    @classmethod
    def drawn(cls, rng: Rng) -> System:
        network = str(rng.choice(["tcp", "rdma"]))
        tcp = network == "tcp"
        gigabits = rng.choice([10, 25, 100] if tcp else [100, 200, 400, 800])
        return cls(
            per_host=int(rng.choice([1, 2, 4, 8])),
            line=float(gigabits) / 8 * 1e9,
            network=network,
            efficiency=float(rng.uniform(*NETWORKS[network])),
            hop=between(rng, 2e-5, 1e-4) if tcp else between(rng, 4e-6, 2e-5),
            inner_hop=between(rng, 2e-6, 8e-6),
            inner=float(rng.choice([10e9, 40e9, 100e9, 200e9])),
            half=between(rng, 4e3, 1e5),
            congestion=float(rng.uniform(0.0, 0.1)),
            rack=int(rng.choice([4, 8, 16])),
            beyond_rack=float(rng.choice([1.0, 1.0, rng.uniform(0.5, 1.0)])),
            is_tree=bool(rng.random() < 0.3),
            crowding=float(rng.uniform(0.0, 0.06)),
            uneven_ranks=between(rng, 0.002, 0.04),
            uneven_hosts=between(rng, 0.001, 0.02),
        )

    def bandwidth(self, hosts: int) -> float:
        """Return the bandwidth of a host's link while the given number of hosts send at once."""
        found = self.efficiency * self.line * float(hosts) ** -self.congestion
        return found * (self.beyond_rack if hosts > self.rack else 1.0)

    def gathers(self, bytes: float, hosts: int, per_host: int) -> float:
        """Return the seconds of an all-gather in one pipelined ring."""
        ranks = hosts * per_host
        if ranks == 1:
            return 0.0
        outer_hops = hosts if hosts > 1 else 0
        latency = outer_hops * self.hop + (ranks - 1 - min(outer_hops, ranks - 1)) * self.inner_hop
        if self.is_tree and hosts > 1:
            latency = np.log2(hosts) * 2 * self.hop + per_host * self.inner_hop
        slowest = self.bandwidth(hosts) if hosts > 1 else self.inner
        moved = (ranks - 1) / ranks * bytes / min(slowest, self.inner)
        return float(latency + moved * (1 + self.half * ranks / max(bytes, 1.0)))

    def reduces(self, bytes: float, hosts: int, per_host: int) -> float:
        """Return the seconds of an all-reduce."""
        return 2 * self.gathers(bytes, hosts, per_host)

    def slowest(self, hosts: int, per_host: int, rng: Rng) -> float:
        """Return the mean over steps of the slowest rank's factor, on hosts that differ."""
        own = np.exp(self.uneven_hosts * rng.standard_normal((1, hosts, 1)))
        each = np.exp(self.uneven_ranks * rng.standard_normal((60, hosts, per_host)))
        return float((own * each).max(axis=(1, 2)).mean() / np.exp(self.uneven_ranks**2 / 2))


@dataclass(frozen=True)
class Network:
    """The truth about a model: layers in the order of backward."""

    bytes: np.ndarray[Any, Any]
    shares: np.ndarray[Any, Any]
    backward: float
    slowed: float
    floor: float
    sharpness: float

    @classmethod
    def drawn(cls, rng: Rng) -> Network:
        layers = int(rng.integers(12, 60))
        bytes = rng.lognormal(0, rng.uniform(0.2, 1.5), layers)
        bytes *= np.linspace(1 + rng.uniform(0, 4), 1, layers)  # the last layers are the largest
        shares = rng.lognormal(0, 0.7, layers)
        return cls(
            bytes=bytes / bytes.sum() * between(rng, 2e7, 3e9),
            shares=shares / shares.sum(),
            backward=float(rng.uniform(0.55, 0.72)),
            slowed=float(rng.uniform(0.0, 0.15)),
            floor=float(rng.uniform(0.02, 0.4)),
            sharpness=float(rng.uniform(1.0, 4.0)),
        )

    def busy(self, share: float) -> float:
        """Return the computing time of a share of the first batch, relative to that batch."""
        power = self.sharpness
        law = (share**power + self.floor**power) / (1 + self.floor**power)
        return float(law ** (1 / power))


def ddp(net: Network, system: System, busy: float, hosts: int, per_host: int) -> float:
    """Return the seconds of a step that sends buckets of 25 MB one by one once they are ready."""
    now, free, waiting = busy * (1 - net.backward), 0.0, 0.0
    for place, (bytes, share) in enumerate(zip(net.bytes, net.shares, strict=True)):
        took = busy * net.backward * share
        shared = min(took, max(0.0, free - now))
        now += took + net.slowed * shared
        waiting += bytes
        if waiting > 25e6 or place == len(net.bytes) - 1:
            free = max(free, now) + system.reduces(waiting, hosts, per_host)
            waiting = 0.0
    return max(now, free)


def fsdp(net: Network, system: System, busy: float, hosts: int, per_host: int) -> float:
    """Return the seconds of a step that gathers each layer one ahead and scatters its gradients."""
    gathers = [system.gathers(bytes, hosts, per_host) for bytes in net.bytes]
    now = sending = 0.0
    for took, gather in zip(net.shares[::-1], gathers[::-1], strict=True):
        sending = max(sending, now - busy * took) + gather
        now = max(now, sending) + busy * (1 - net.backward) * took
    for took, gather in zip(net.shares, gathers, strict=True):
        sending = max(sending, now - busy * took) + gather
        now = max(now, sending) + busy * net.backward * took * (1 + net.slowed)
        sending = max(sending, now) + gather
    return max(now, sending)


def unseen(
    seed: int,
    *,
    strategy: str | None = None,
    is_strong: bool | None = None,
    first: int | None = None,
) -> tuple[Series, tuple[float, ...]]:
    """Return the series of a seed, and its rates without noise.

    Args:
        seed: the seed of all random draws.
        strategy: "ddp" or "fsdp"; None is either.
        is_strong: True if all ranks share one batch, False if each has its own; None is either.
        first: the ranks of the first row; None is any number.
    """
    rng = np.random.default_rng([seed, 20])
    system, net = System.drawn(rng), Network.drawn(rng)
    drawn = (str(rng.choice(["ddp", "ddp", "fsdp"])), bool(rng.random() < 0.4))
    strategy = strategy or drawn[0]
    is_strong = drawn[1] if is_strong is None else is_strong
    begin = int(rng.choice([1, 1, 1, 2, 4, 8]))
    begin = first or begin
    counts = [begin * 2**n for n in range(6 if begin < 16 else 5)]
    shapes, batch = [], 256.0
    for count in counts:
        per_host = min(count, system.per_host)
        own = batch * counts[0] / count if is_strong else batch
        shapes.append(Shape(count // per_host, per_host, own, servers=1))
    # Sending between two hosts takes 2% to 150% of the time of computing.
    ratio = between(rng, 0.02, 1.5)
    busy = system.reduces(float(net.bytes.sum()), 2, system.per_host) / ratio
    play = {"ddp": ddp, "fsdp": fsdp}[strategy]
    reads = bool(rng.random() < 0.1)
    limit = rng.uniform(1.0, 6.0) * shapes[0].samples / busy
    rates = []
    for shape in shapes:
        own = busy * net.busy(shape.batch / batch) * (1 + system.crowding * (shape.per_host - 1))
        own *= system.slowest(shape.hosts, shape.per_host, rng)
        rate = shape.samples / play(net, system, own, shape.hosts, shape.per_host)
        rates.append(min(rate, limit * shape.hosts) if reads else rate)
    noise = between(rng, 0.01, 0.05)
    measured = [rate * float(np.exp(noise * rng.standard_normal())) for rate in rates]
    low, high = NETWORKS[system.network]
    prior = Prior(
        nic=(low * system.line, high * system.line),
        inside=(0.1 * 1.5 * system.inner, 0.9 * 1.5 * system.inner),
        **({"summing": GPU_SUMS} if system.network == "rdma" else {}),
    )
    buckets = cut(float(net.bytes.sum()))
    if strategy == "fsdp":  # a run reports the number of layers that are gathered at a time
        count = len(net.bytes)
        buckets = tuple(Bucket(bytes, (n + 1) / count) for n, bytes in enumerate(net.bytes))
    job = Job(
        buckets=buckets, batch=shapes[0].batch, reduction="nccl",
        strategy=strategy,  # type: ignore[arg-type]
    )  # fmt: skip
    kind = f"{strategy}, {'strong' if is_strong else 'weak'}"
    found = Series(
        source="unseen", name=f"{seed}: {kind}", is_judged=True, system=system.network,
        unit="samples/s", per_host=system.per_host, shapes=tuple(shapes), rates=tuple(measured),
        job=job, prior=prior, reads_files=reads, workers=0,
    )  # fmt: skip
    return found, tuple(rates)
