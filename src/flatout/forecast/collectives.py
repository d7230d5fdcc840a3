"""What it takes ranks to add up or exchange a tensor, by latency, bandwidth and the adding itself.

All functions take `alpha`, the seconds that a message takes that is empty; `beta`, the seconds of
a byte on a host's link, in one direction; and `gamma`, the seconds in which a rank adds up a byte:
numbers, or arrays with a draw in each place. `bytes` are those of one rank's tensor. The terms are
those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, and of each reduction's own file in `flatout/strategies/reductions`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# Numbers that a rank of 16 bits is packed from and unpacked to, beside adding up.
_PACKING = 2.0


class Link(NamedTuple):
    """Between ranks: `alpha`, `beta` and `gamma`, see above."""

    alpha: Floats
    beta: Floats
    gamma: Floats


def ring(bytes: float, ranks: int, link: Link) -> Floats:
    """Pieces go round twice: each link carries 2 (p - 1) / p of the bytes.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
    2009. Ranks of one host lie beside one another in the ring, so that a host's link carries no
    more than that, however many ranks the host has. gloo and NCCL reduce so where tensors are
    large.
    """
    turns, share = ranks - 1, (ranks - 1) / ranks
    return 2 * turns * link.alpha + share * bytes * (2 * link.beta + link.gamma)


def to_one(bytes: float, ranks: int, link: Link) -> Floats:
    """Reduced to the first rank, which broadcasts the sum."""
    return reduce_and_broadcast(bytes, ranks, 1, link)


def shared(bytes: float, ranks: int, link: Link) -> Floats:
    """In memory that all see: two meetings, each rank reads its piece of all and copies the rest.

    `beta` and `gamma` are of memory.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    return 2 * link.alpha + bytes * ((ranks - 1) / ranks * link.beta + link.gamma)


def halves(bytes: float, ranks: int, hosts: int, link: Link) -> Floats:
    """As 16-bit numbers: pieces to their owners, sums to all; half the bytes of a ring.

    Pieces go from each rank to each, so a host's link carries those of all its ranks.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    per_host = ranks // hosts
    out = per_host * (ranks - per_host) / ranks if hosts > 1 else (ranks - 1) / ranks
    back = (ranks - 1) / ranks
    sent = bytes / 2 * (out + back) * link.beta
    return 2 * (ranks - 1) * link.alpha + sent + bytes * (1 + _PACKING) * link.gamma


def power_sgd(bytes: float, ranks: int, rank: int, link: Link) -> Floats:
    """Two thin matrices in place of a square one of fp32: 2 r sqrt(n) numbers of n.

    Vogels, Karimireddy and Jaggi, "PowerSGD", 2019. The three products read the whole gradient.
    """
    if ranks == 1:
        return np.zeros_like(link.alpha)
    thin = min(bytes / 2, 4 * 2 * rank * (bytes / 4) ** 0.5)
    return 2 * ring(thin / 2, ranks, link) + 3 * bytes * link.gamma


def hierarchical(bytes: float, hosts: int, per_host: int, inner: Link, outer: Link) -> Floats:
    """To a rank of each host, between these in a ring, and back within the hosts.

    Goyal et al., "Accurate, Large Minibatch SGD", 2017.
    """
    within = reduce_and_broadcast(bytes, per_host, 1, inner, shares_link=False)
    return within + (ring(bytes, hosts, outer) if hosts > 1 else 0.0)


def all_gather(bytes: float, ranks: int, link: Link) -> Floats:
    """Of a tensor whose parts lie on the ranks: (p - 1) / p of its bytes to each, in a ring.

    A reduce-scatter takes the same and the adding, see `ring`.
    """
    return (ranks - 1) * link.alpha + (ranks - 1) / ranks * bytes * link.beta


def all_to_all(bytes: float, ranks: int, hosts: int, link: Link) -> Floats:
    """Each rank has other bytes for each: a host's link carries those of all its ranks."""
    if ranks == 1:
        return np.zeros_like(link.alpha)
    per_host = ranks // hosts
    sent = per_host * (ranks - per_host) / ranks if hosts > 1 else (ranks - 1) / ranks
    return (ranks - 1) * link.alpha + sent * bytes * link.beta


def reduce_and_broadcast(
    bytes: float, ranks: int, owners: int, link: Link, *, shares_link: bool = True
) -> Floats:
    """Each owner's share is added up on it, and then goes from it to all, as gloo does it.

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
    """How many times as long as one message a broadcast takes, in gloo's binomial tree.

    A rank that has the data sends it to all its children at once, so that they share its link and
    get it together. Of 2^k ranks that makes k (k + 1) / 2.
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
    """Workers send gradients to servers and get weights back: the time of the fullest server.

    A server's link takes in what each worker of another host sends it, while as much goes out. A
    server of equal shares has bytes / servers; where tensors stay whole, no less than the largest
    one. A server that stands beside workers takes in their weights, too. Its CPU adds up what
    comes. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014;
    published runs collapse where this term says so, see docs/forecast_accuracy.md.
    """
    share = max(bytes / servers, largest)
    if workers == beside:
        return np.zeros_like(link.alpha)
    own = beside * bytes * (servers - 1) / servers
    moved = ((workers - beside) * share + own) * link.beta
    return 2 * link.alpha + np.maximum(moved, workers * share * link.gamma)
