"""The seconds that ranks take to sum or exchange a tensor.

All functions take a `Link`. `bytes` are those of one rank's tensor. The terms are those of Thakur,
Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, and of
each reduction's own file in `flatout/strategies/reductions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from flatout.forecast.job import Floats

# Packing to 16 bits and unpacking take as long as summing these multiples of the bytes.
_PACKING = 2.0


class Link(NamedTuple):
    """A link between ranks, with one draw at each index.

    Attributes:
        alpha: seconds of an empty message.
        beta: seconds per byte on a host's link, in one direction.
        gamma: seconds in which a rank sums a byte.
    """

    alpha: Floats
    beta: Floats
    gamma: Floats


def ring(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a ring all-reduce: each link carries 2 (p - 1) / p of the bytes.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
    2009. Ranks of one host are neighbors in the ring, so a host's link carries no more with more
    ranks on the host. gloo and NCCL reduce large tensors in this way.
    """
    turns, share = ranks - 1, (ranks - 1) / ranks
    return 2 * turns * link.alpha + share * bytes * (2 * link.beta + link.gamma)


def to_one(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a sum on the first rank, which broadcasts it."""
    return reduce_and_broadcast(bytes, ranks, 1, link)


def shared(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a sum in shared memory; `beta` and `gamma` are those of memory.

    Ranks meet twice. Each reads its piece of all tensors, and copies the rest.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    return 2 * link.alpha + bytes * ((ranks - 1) / ranks * link.beta + link.gamma)


def halves(bytes: float, ranks: int, hosts: int, link: Link) -> Floats:
    """Return the time of a sum of 16-bit numbers: half the bytes of a ring.

    Each rank sends pieces to each, so a host's link carries those of all its ranks.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    sent = bytes / 2 * (_leaving(ranks, hosts) + (ranks - 1) / ranks) * link.beta
    return 2 * (ranks - 1) * link.alpha + sent + bytes * (1 + _PACKING) * link.gamma


def power_sgd(bytes: float, ranks: int, rank: int, link: Link) -> Floats:
    """Return the time of PowerSGD: 2 r sqrt(n) numbers in place of the n of a square matrix.

    Vogels, Karimireddy and Jaggi, "PowerSGD", 2019. Three products read the whole gradient.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    thin = min(bytes / 2, 4 * 2 * rank * (bytes / 4) ** 0.5)
    return 2 * ring(thin / 2, ranks, link) + 3 * bytes * link.gamma


def all_gather(bytes: float, ranks: int, link: Link) -> Floats:
    """Return the time of a ring that gathers a tensor of which each rank has a part."""
    return (ranks - 1) * link.alpha + (ranks - 1) / ranks * bytes * link.beta


def all_to_all(bytes: float, ranks: int, hosts: int, link: Link) -> Floats:
    """Return the time in which each rank sends other bytes to each."""
    if ranks == 1:
        return np.zeros_like(link.alpha)
    return (ranks - 1) * link.alpha + _leaving(ranks, hosts) * bytes * link.beta


def _leaving(ranks: int, hosts: int) -> float:
    """Return the bytes on a host's link as a multiple of one rank's bytes, if all send to all."""
    if hosts == 1:
        return (ranks - 1) / ranks
    per_host = ranks // hosts
    return per_host * (ranks - per_host) / ranks


def reduce_and_broadcast(
    bytes: float, ranks: int, owners: int, link: Link, *, shares_link: bool = True
) -> Floats:
    """Return the time in which each owner sums its share and sends it to all, as gloo does.

    A reduction is a ring's first half, whose pieces the owner gathers; a broadcast is a binomial
    tree, see `broadcast_turns`. Owners send at once, each on its link.
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
    """Return the messages' times that a broadcast takes in gloo's binomial tree.

    A rank that has the data sends it to all its children at once. They share its link, and get the
    data together. With 2^k ranks that makes k (k + 1) / 2.
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
    """Return the time of the fullest parameter server.

    Workers send gradients to servers and get weights back. A server's link carries the gradients of
    each worker of another host, and the same bytes back. A server of equal shares has bytes /
    servers; if tensors stay whole, at least the largest. A server with workers on its host gets
    their weights, too. Its CPU sums the gradients. Li et al., "Scaling Distributed Machine Learning
    with the Parameter Server", 2014. Published runs collapse where this term is large.

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
        begin = -hidden * backward * (1 - share)  # 0 is the end of the backward
        end = np.maximum(begin, end) + seconds
    return np.maximum(end, 0.0)
