"""Ranks of one host that act as one rank (a tower) for servers on other hosts.

The ranks sum their gradients in shared memory. One rank, the leader, sends the sum, and distributes
the weights of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatout.strategies.reductions.shared import add_in_order
from flatout.world import Mailbox, World, mailbox_of

# Maximum number of bytes that are distributed at once.
_AT_ONCE = 1 << 20


class Tower:
    """The ranks of this host."""

    def __init__(self, world: World, mailbox: Mailbox | None, *, is_leader: bool) -> None:
        self._world, self._mailbox, self.is_leader = world, mailbox, is_leader

    def add_up(self, parts: Sequence[torch.Tensor]) -> None:
        """Set the leader's tensors to the sums over all ranks, in the order of the ranks."""
        boxes = self._met(parts, "gradients of the ranks of this host")
        if self.is_leader and boxes:
            for box, part in zip(zip(*boxes, strict=True), parts, strict=True):
                add_in_order(list(box), part)

    def share(self, parts: Sequence[torch.Tensor], what: str) -> None:
        boxes = self._met(parts, what)
        if not self.is_leader:
            for box, part in zip(boxes[0], parts, strict=True):
                part.copy_(box)

    def hand_out(self, parts: Sequence[torch.Tensor], count: int, what: str) -> list[torch.Tensor]:
        lengths = torch.tensor([len(part) for part in parts] or [0] * count)
        self.share([lengths], what)
        result = list(parts) if self.is_leader else []
        for length in lengths[len(result) :].tolist():
            result.append(torch.empty(length, dtype=torch.uint8))
        for part in result:
            for piece in torch.split(part, _AT_ONCE):
                self.share([piece], what)
        return result

    def _met(self, parts: Sequence[torch.Tensor], what: str) -> list[list[torch.Tensor]]:
        later = self._world.begun(None, what)
        if self._mailbox is None:
            return []
        sizes = [part.nbytes for part in parts]
        room = self._mailbox.room(sum(sizes))
        for part, into in zip(parts, torch.split(room, sizes), strict=True):
            into.view(part.dtype).copy_(part)
        with self._world.within(later):
            boxes = self._mailbox.meet()
        return [
            [
                own.view(part.dtype)
                for own, part in zip(torch.split(box[: sum(sizes)], sizes), parts, strict=True)
            ]
            for box in boxes
        ]


def tower_of(world: World) -> tuple[list[int], Tower | None]:
    """Return the ranks that communicate with servers, one of each host, and this host's tower.

    All ranks call this. If the ranks of a host share no memory, each rank communicates itself.
    """
    nodes = world.gather(world.place.node, "nodes of the ranks")
    by_node = [[r for r, node in enumerate(nodes) if node == own] for own in sorted({*nodes})]
    group, mailbox = world.among(*by_node), None
    assert group is not None
    if len(group.ranks) > 1:
        mailbox = mailbox_of(group, world.timeout_s)
    could = mailbox is not None or len(group.ranks) == 1
    if not all(world.gather(could, "memory that ranks of a host share")):
        return [*range(world.size)], None
    tower = Tower(world, mailbox, is_leader=group.own == 0)
    return [ranks[0] for ranks in by_node], tower
