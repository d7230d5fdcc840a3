"""Pieces that are passed around a ring: every link carries the same, and no more than it must.

First each piece goes once around and is added up on its way, then each sum goes around. A rank
sends 2 (n - 1) / n times the gradients, however many ranks there are (Patarasuk and Yuan,
"Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", 2009).
"""

from __future__ import annotations

import torch

from flatout.strategies.reductions.exchange import exchange
from flatout.strategies.reductions.reduction import Flat, Reduction
from flatout.world import Group


class Ring(Reduction):
    """Each rank sends to the next one only."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def add_up(self, flat: Flat) -> None:
        """In 2 (n - 1) turns."""
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
        """Send a piece to the next rank while another comes from the one before."""
        ranks, own, channel = self.group
        after, before = ranks[(own + 1) % len(ranks)], ranks[own - 1]
        exchange([(come, before)], [(piece, after)], channel)
