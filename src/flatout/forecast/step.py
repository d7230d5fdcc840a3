"""Model of a step's time in seconds, as a sum of terms.

    sum(step_terms(job, shape, draws).values())

Each term is an array with one value for each draw of the unknown values of a machine and a network.
So each result has an interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from flatout.forecast import collectives
from flatout.forecast.collectives import Link, exposed
from flatout.forecast.job import Floats, Job, ReductionTime, Shape

# Transfers of table rows per step, in units of the rows' bytes: rows to ranks, gradients back, and
# the ids for both.
_ROW_TRIPS = 2.1
LINK_ERROR = 0.18
"""Error of the model's link times at twice the timed number of ranks.

The value is a standard deviation of the logarithm. Each further doubling of the ranks adds the same
error again.
"""


@dataclass(frozen=True)
class MachineDraws:
    """Draws of the unknown values of a machine and a network; see `Prior`.

    Attributes:
        seconds: seconds in which one rank, alone on its host, computes a step with the job's batch.
        corrections: pairs of a timed number of ranks and the factor from the model's step time to
            the measured step time. Between pairs the factor is interpolated by the logarithm of the
            ranks.
    """

    seconds: Floats
    fixed: Floats
    contention: Floats
    power: Floats
    spread: Floats
    hidden: Floats
    rtt: Floats
    nic: Floats
    summing: Floats
    inside: Floats
    input: Floats
    total_input: Floats
    corrections: tuple[tuple[int, float], ...] = ()

    def take(self, places: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> MachineDraws:
        names = [item.name for item in fields(self) if item.name != "corrections"]
        return replace(self, **{name: getattr(self, name)[places] for name in names})

    def beyond(self, growth: float) -> MachineDraws:
        """Return draws with the error of links at `growth` times the timed number of ranks."""
        if growth <= 1:
            return self
        drawn = np.random.default_rng(4).standard_normal(len(self.seconds))
        off = np.exp(LINK_ERROR * math.log2(growth) * drawn)
        return replace(
            self,
            rtt=self.rtt * off,
            nic=self.nic / off,
            summing=self.summing / off,
            inside=self.inside / off,
        )

    def correction(self, ranks: int) -> float:
        if not self.corrections:
            return 1.0
        timed, factors = np.log(np.array(self.corrections)).T
        return float(np.exp(np.interp(np.log(ranks), timed, factors)))


def step_terms(
    job: Job, shape: Shape, draws: MachineDraws, *, growth: float = 1.0
) -> dict[str, Floats]:
    """Return the terms that add up to a step's seconds."""
    draws = draws.beyond(growth)
    compute = _computing(job, shape, draws)
    crowded = compute * _crowding(shape, draws)
    busy = compute + crowded
    terms = {
        "compute": compute,
        "shared host": crowded,
        "stragglers": busy * draws.spread * _waiting(job, shape.ranks),
        "gradient sync": _syncing(job, shape, draws, busy / shape.accumulated),
    }
    factor = draws.correction(shape.ranks)
    terms = {name: factor * term for name, term in terms.items()}
    per_host = shape.samples / shape.hosts / draws.input
    reading = np.maximum(per_host, shape.samples / draws.total_input)
    return terms | {"input": np.maximum(0.0, reading - sum(terms.values()))}


def _computing(job: Job, shape: Shape, draws: MachineDraws) -> Floats:
    # A part of a micro-batch's time does not depend on its size.
    share = draws.fixed + (1 - draws.fixed) * (shape.batch / job.batch)
    return draws.seconds * share * shape.accumulated


def _crowding(shape: Shape, draws: MachineDraws) -> Floats:
    if shape.per_host == 1:
        return np.zeros_like(draws.seconds)
    return draws.contention * (shape.per_host - 1.0) ** draws.power


def _waiting(job: Job, ranks: int) -> float:
    # Ranks of local SGD wait for the slowest sum of steps. The relative spread of a sum of
    # independent steps is smaller by the root of their number.
    apart = job.sync_every if job.strategy == "local_sgd" else 1
    return job.spread.excess(ranks) / math.sqrt(apart)


def _syncing(job: Job, shape: Shape, draws: MachineDraws, busy: Floats) -> Floats:
    if shape.ranks == 1 or shape.silent:
        return np.zeros_like(busy)
    inner, outer = _links(shape, draws)
    backward, ready = busy * job.backward, [bucket.ready for bucket in job.buckets]
    rows = _rows(job, shape, outer)
    match job.strategy:
        case "parameter_server":
            return rows + _serving(job, shape, inner, outer, draws.hidden * busy)
        case "local_sgd":
            bytes = job.averaged or job.bytes
            return rows + _reduced(job, shape, bytes, inner, outer) / job.sync_every
        case "fsdp":
            hop = _mean_hop(shape, inner, outer)
            gathers = [
                collectives.all_gather(bucket.bytes, shape.ranks, hop) for bucket in job.buckets
            ]
            # A reduce-scatter takes as long as a gather, and adds up the bytes.
            both = [
                2 * gather + bucket.bytes * outer.gamma
                for gather, bucket in zip(gathers, job.buckets, strict=True)
            ]
            return exposed(gathers, ready, busy - backward, draws.hidden) + exposed(
                both, ready, backward, draws.hidden
            )
        case _:
            takes_each = [
                _reduced(job, shape, bucket.bytes, inner, outer) for bucket in job.buckets
            ]
            return rows + exposed(takes_each, ready, backward, draws.hidden)


def _rows(job: Job, shape: Shape, outer: Link) -> Floats:
    if not job.row_bytes:
        return np.zeros_like(outer.alpha)
    own = job.row_bytes * shape.batch
    if job.tables == "sharded":
        return collectives.all_to_all(_ROW_TRIPS * own, shape.ranks, shape.hosts, outer)
    return collectives.all_gather(own * shape.ranks, shape.ranks, outer)


def _serving(job: Job, shape: Shape, inner: Link, outer: Link, hides: Floats) -> Floats:
    servers = shape.servers or job.servers
    match job.served:
        case "hosts":
            takes = collectives.fullest_server(
                job.bytes, shape.hosts, 1, servers, job.largest, outer
            )
            within = collectives.ring(job.bytes, shape.per_host, inner)
            return np.maximum(0.0, takes + within - hides)
        case "ranks":
            # The first ranks are the servers, so the first host has as many as it has ranks.
            on_hosts = servers / min(servers, shape.per_host)
            return collectives.fullest_server(
                job.bytes, shape.ranks, shape.per_host, on_hosts, job.largest, outer
            )
        case "reduced":
            return collectives.reduce_and_broadcast(job.bytes, shape.ranks, servers, outer)
        case "towers":
            within = collectives.shared(job.bytes, shape.per_host, inner)
            return within + _to_servers_apart(job, shape.hosts, 1, servers, outer)
        case "apart":
            return _to_servers_apart(job, shape.ranks, shape.per_host, servers, outer)


def _to_servers_apart(job: Job, workers: int, per_host: int, servers: int, link: Link) -> Floats:
    fullest = collectives.fullest_server(job.bytes, workers, 0, servers, job.largest, link)
    return np.maximum(fullest, per_host * job.bytes * link.beta)


def sending(job: Job, sent: ReductionTime, draws: MachineDraws) -> Floats:
    """Return the seconds of a reduction that is timed without a step."""
    alone = replace(job, reduction=sent.reduction, compression="off")
    return _reduced(alone, sent.shape, sent.bytes, *_links(sent.shape, draws))


def _links(shape: Shape, draws: MachineDraws) -> tuple[Link, Link]:
    inner = Link(draws.rtt / 20, 1 / draws.inside, np.zeros_like(draws.inside))
    if shape.hosts == 1:
        return inner, inner
    return inner, Link(draws.rtt / 2, 1 / draws.nic, 1 / draws.summing)


def _reduced(job: Job, shape: Shape, bytes: float, inner: Link, outer: Link) -> Floats:
    ranks, hosts, per_host = shape.ranks, shape.hosts, shape.per_host
    if job.reduction == "hierarchical" and hosts > 1:
        between = _compressed(job, hosts, hosts, bytes, outer)
        within = collectives.reduce_and_broadcast(bytes, per_host, 1, inner, shares_link=False)
        return within + between
    if job.compression != "off":
        return _compressed(job, ranks, hosts, bytes, outer)
    match job.reduction:
        case "shared" if hosts == 1:
            return collectives.shared(bytes, ranks, inner)
        case "to_one":
            return collectives.to_one(bytes, ranks, outer)
        case _:
            return collectives.ring(bytes, ranks, _mean_hop(shape, inner, outer))


def _mean_hop(shape: Shape, inner: Link, outer: Link) -> Link:
    # In a ring of all ranks, all bytes leave each host once.
    within = (shape.ranks - shape.hosts) / shape.ranks
    alpha = within * inner.alpha + (1 - within) * outer.alpha
    return Link(alpha, np.maximum(inner.beta, outer.beta), outer.gamma)


def _compressed(job: Job, ranks: int, hosts: int, bytes: float, link: Link) -> Floats:
    match job.compression:
        case "fp16" | "bf16":
            return collectives.halves(bytes, ranks, hosts, link)
        case "powersgd":
            return collectives.power_sgd(bytes, ranks, job.powersgd_rank, link)
    return collectives.ring(bytes, ranks, link)
