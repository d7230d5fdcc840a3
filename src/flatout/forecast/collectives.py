"""The seconds that ranks take to sum or exchange a tensor.

All functions take a `Link`. `bytes` is the size of each rank's tensor, and times are in seconds.
The terms follow Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005, and of each reduction's own file in `flatout/strategies/reductions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from flatout.forecast.job import Floats

# Packing to 16 bits and unpacking take as long as summing this multiple of the bytes.
_PACKING = 2.0


class Link(NamedTuple):
    """A link between ranks; each attribute is an array with one value per draw.

    Attributes:
        alpha: seconds of an empty message.
        beta: seconds per byte on a host's link, in one direction.
        gamma: seconds per byte for summing on a rank.
    """

    alpha: Floats
    beta: Floats
    gamma: Floats


def ring(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a ring all-reduce: each link carries 2 (p - 1) / p of the bytes.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
    2009. Ranks of one host are neighbors in the ring, so more ranks on a host do not increase the
    bytes on the host's link. gloo and NCCL reduce large tensors in this way.
    """
    turns, share = ranks - 1, (ranks - 1) / ranks
    return 2 * turns * link.alpha + share * bytes * (2 * link.beta + link.gamma)


def to_one(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a sum on the first rank, which then broadcasts the sum."""
    return reduce_and_broadcast(bytes, ranks, 1, link)


def shared(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a sum in shared memory; `beta` and `gamma` are seconds per byte of memory.

    There are two barriers. Each rank sums 1/ranks of all tensors, and copies the remaining sums.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    return 2 * link.alpha + bytes * ((ranks - 1) / ranks * link.beta + link.gamma)


def halves(bytes: float, ranks: int, hosts: int, link: Link) -> Floats:
    """Return the time of a sum of 16-bit numbers: half the bytes of a ring.

    Each rank sends a part of its tensor to each other rank, so a host's link carries the parts that
    all its ranks send.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    sent = bytes / 2 * (_leaving(ranks, hosts) + (ranks - 1) / ranks) * link.beta
    return 2 * (ranks - 1) * link.alpha + sent + bytes * (1 + _PACKING) * link.gamma


def power_sgd(bytes: float, ranks: int, rank: int, link: Link) -> Floats:
    """Return the time of PowerSGD: 2 r sqrt(n) numbers replace the n numbers of a square matrix.

    Vogels, Karimireddy and Jaggi, "PowerSGD", 2019. Three matrix products read the whole gradient.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    thin = min(bytes / 2, 4 * 2 * rank * (bytes / 4) ** 0.5)
    return 2 * ring(thin / 2, ranks, link) + 3 * bytes * link.gamma


def all_gather(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a ring all-gather of a tensor of which each rank has a part."""
    return (ranks - 1) * link.alpha + (ranks - 1) / ranks * bytes * link.beta


def all_to_all(bytes: float, ranks: int, hosts: int, link: Link) -> Floats:
    """Return the time of an all-to-all, in which each rank sends different bytes to each rank."""
    if ranks == 1:
        return np.zeros_like(link.alpha)
    return (ranks - 1) * link.alpha + _leaving(ranks, hosts) * bytes * link.beta


def _leaving(ranks: int, hosts: int) -> float:
    """Return the bytes on a host's link in an all-to-all, as a multiple of one rank's bytes."""
    if hosts == 1:
        return (ranks - 1) / ranks
    per_host = ranks // hosts
    return per_host * (ranks - per_host) / ranks


def reduce_and_broadcast(
    bytes: float, ranks: int, owners: int, link: Link, *, shares_link: bool = True
) -> Floats:
    """Return the time in which each owner sums its part and sends the sum to all, as gloo does.

    An owner is a rank that sums a part of the tensor. A reduction is the first half of a ring,
    after which the owner collects the results; a broadcast is a binomial tree, see
    `broadcast_turns`. All owners send at the same time, each on its own link.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    share, levels = (ranks - 1) / ranks, (ranks - 1).bit_length()
    gathered = share * (1 + 1 / owners)
    given = max((broadcast_turns(ranks) if shares_link else levels) / owners, share)
    messages = 2 * (ranks - 1) + levels
    return messages * link.alpha + bytes * ((gathered + given) * link.beta + share * link.gamma)


@cache
def broadcast_turns(ranks: int) -> int:
    """Return the time of a broadcast in gloo's binomial tree, in units of one message's time.

    A rank that has the data sends the data to all its children at once. The children share the
    rank's link, so all of them have the data at the same time. With 2^k ranks the result is k (k +
    1) / 2.
    """

    def last_below(rank: int, has_it: int) -> int:
        below = range(rank.bit_length(), ranks.bit_length())
        children = [rank + (1 << bit) for bit in below if rank + (1 << bit) < ranks]
        arrives = has_it + len(children)
        return max([has_it, *(last_below(child, arrives) for child in children)])

    return last_below(0, 0)


def fullest_server(
    bytes: float, workers: int, beside: int, servers: float, largest: float, link: Link
) -> Floats:
    """Return the time of the parameter server whose link carries the most bytes.

    Workers send gradients to servers and get weights back. A server's link carries the gradients of
    each worker of another host, and the same bytes back. A server holds bytes / servers if tensors
    are split evenly; if tensors stay whole, at least the bytes of the largest tensor. The link of a
    server with workers on its host also carries the weights for these workers. Its CPU sums the
    gradients. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014.
    Published runs collapse where this term is large.

    Args:
        beside: number of workers on the server's host.
    """
    share = max(bytes / servers, largest)
    if workers == beside:
        return np.zeros_like(link.alpha)
    own = beside * bytes * (servers - 1) / servers
    moved = ((workers - beside) * share + own) * link.beta
    return 2 * link.alpha + np.maximum(moved, workers * share * link.gamma)


def exposed(
    takes: Sequence[Floats], ready: Sequence[float], backward: Floats, hidden: Floats
) -> Floats:
    """Return the seconds from the end of the backward pass to the arrival of the last bucket.

    One bucket is sent at a time: f_i = max(ready_i, f_(i-1)) + T(bytes_i), as in
    DistributedDataParallel (Li et al., "PyTorch Distributed", 2020).
    """
    end = np.full_like(backward, -np.inf)
    for seconds, share in zip(takes, ready, strict=True):
        begin = -hidden * backward * (1 - share)  # time 0 is the end of the backward pass
        end = np.maximum(begin, end) + seconds
    return np.maximum(end, 0.0)
