"""One rank adds up what all others send, and tells them the sum, as a parameter server does."""

from __future__ import annotations

import torch.distributed as dist

from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group


class ToOne(Reduction):
    """Reduce to the first rank of a group, then broadcast: fewest turns, most work for one."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def add_up(self, flat: Flat) -> None:
        """In two turns."""
        first, channel = self.group.ranks[0], self.group.channel
        dist.reduce(flat.values, first, group=channel)
        dist.broadcast(flat.values, first, group=channel)
