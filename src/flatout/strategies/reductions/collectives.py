"""Reductions by the library's own collectives, and by messages from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group

Leg = tuple[torch.Tensor, int]
"""A tensor, and the rank of the World that it goes to or comes from."""


class AllReduce(Reduction):
    """Sums by the library's all-reduce."""

    is_exact = True

    def __init__(self, group: Group) -> None:
        self.group = group

    def started(self, device: torch.device) -> Self:
        """Note the device; the library has its own threads."""
        self.device = device
        return self

    def add_up(self, flat: Flat) -> None:
        dist.all_reduce(flat.values, group=self.group.channel)

    def begin(self, flat: Flat) -> Any:
        """Sum in the library's own threads, and return an object to `wait()` for."""
        return dist.all_reduce(flat.values, group=self.group.channel, async_op=True)


class ToOne(Reduction):
    """Reduce to the first rank of a group, then broadcast: fewest turns, most work for one rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def add_up(self, flat: Flat) -> None:
        first, channel = self.group.ranks[0], self.group.channel
        dist.reduce(flat.values, first, group=channel)
        dist.broadcast(flat.values, first, group=channel)


class Hierarchical(Reduction):
    """Reduce to a node's first rank, sum between these ranks, broadcast within the node.

    The slow link thus carries each sum once. The first rank of a node represents it, as in Goyal et
    al., "Accurate, Large Minibatch SGD", 2017.
    """

    def __init__(self, node: Group, between: Reduction | None, carries: bool) -> None:
        self.node, self.between, self.carries = node, between, carries

    def add_up(self, flat: Flat) -> None:
        shared = len(self.node.ranks) > 1
        if shared:
            dist.reduce(flat.values, self.node.ranks[0], group=self.node.channel)
        if self.between is not None:
            self.between.weight = self.weight
            self.between.add_up(flat)
        if shared:
            dist.broadcast(flat.values, self.node.ranks[0], group=self.node.channel)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the reduction between nodes, on the ranks that take part in it."""
        return self.between.state_dict() if self.between is not None else {}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the states of the reduction between nodes. Ranks without a state took no part."""
        if self.between is not None:
            self.between.load_state_dicts([state for state in states if state])


class Ring(Reduction):
    """Each rank sends only to the next one, so that every link carries the same, minimal load.

    First each piece goes around once and is summed on its way, then each sum goes around. A rank
    sends 2 (n - 1) / n times the gradients with n ranks (Patarasuk and Yuan, "Bandwidth Optimal
    All-reduce Algorithms for Clusters of Workstations", 2009).
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def add_up(self, flat: Flat) -> None:
        """Sum in 2 (n - 1) turns."""
        size, own = len(self.group.ranks), self.group.own
        # With fewer values than ranks some pieces are empty.
        pieces = flat.values.tensor_split(size)
        spare = torch.empty_like(pieces[0])
        for turn in range(size - 1):
            grown = pieces[(own - turn - 1) % size]
            come = spare[: len(grown)]
            self._pass_on(pieces[(own - turn) % size], come)
            grown += come
        for turn in range(size - 1):
            self._pass_on(pieces[(own - turn + 1) % size], pieces[(own - turn) % size])

    def _pass_on(self, piece: torch.Tensor, come: torch.Tensor) -> None:
        """Send a piece to the next rank while another arrives from the rank before."""
        ranks, own, channel = self.group
        after, before = ranks[(own + 1) % len(ranks)], ranks[own - 1]
        exchange([(come, before)], [(piece, after)], channel)


def exchange(come: Iterable[Leg], go: Iterable[Leg], channel: Any) -> None:
    """Send and receive tensors, and return when all are done. Empty tensors are not sent.

    Receives are started first. gloo announces them to the sender on the connection that also
    carries data, so otherwise an announcement would wait until all data are sent.
    """
    legs = [dist.P2POp(dist.irecv, tensor, rank, channel) for tensor, rank in come if len(tensor)]
    legs += [dist.P2POp(dist.isend, tensor, rank, channel) for tensor, rank in go if len(tensor)]
    for work in dist.batch_isend_irecv(legs) if legs else ():
        work.wait()
