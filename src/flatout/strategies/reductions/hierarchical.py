"""Within each node first, then between the nodes: the slow link carries each sum once.

The first rank of a node stands for it, as in Goyal et al., "Accurate, Large Minibatch SGD", 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group


class Hierarchical(Reduction):
    """Reduce to a node's first rank, add up between these, broadcast within the node."""

    def __init__(self, node: Group, between: Reduction | None, carries: bool) -> None:
        self.node, self.between, self.carries = node, between, carries

    def add_up(self, flat: Flat) -> None:
        """In three turns."""
        shared = len(self.node.ranks) > 1
        if shared:
            dist.reduce(flat.values, self.node.ranks[0], group=self.node.channel)
        if self.between is not None:
            self.between.weight = self.weight
            self.between.add_up(flat)
        if shared:
            dist.broadcast(flat.values, self.node.ranks[0], group=self.node.channel)

    def state_dict(self) -> dict[str, Any]:
        """That of what is between the nodes, on the ranks that take part in it."""
        return self.between.state_dict() if self.between is not None else {}

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Those that kept nothing were no first ones of their nodes."""
        if self.between is not None:
            self.between.load_state_dicts([state for state in states if state])
