"""Rows of features that one host has kept are sent to those that need them, each once.

Before an epoch the ranks tell one another which rows the samples that they will read lack. What
another host has comes from there, from one of its ranks to one of the host that lacks it, which
keeps it. What no host has is computed, as on one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from flatout.data import FeatureRows, FeatureStore, Numbers, Turns
from flatout.words import counted, size_words
from flatout.world import World, to_eight

# A link is measured with so many bytes to each rank, and with more while that takes less than so
# many seconds.
_FIRST, _MOST, _LONG_S, _TIMES = 64 << 10, 16 << 20, 0.05, 3
# Bytes that a rank gets at once, about.
_AT_ONCE = 16 << 20


class ReceivedRows(NamedTuple):
    """What came to this host before an epoch.

    Attributes:
        rows: so many.
        bytes: of them.
        seconds: that it took all ranks.
    """

    rows: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = size_words(self.bytes / max(self.seconds, 1e-9))
        return f"{counted(self.rows, 'row')} came from other hosts, at {rate}/s"


class SentRows:
    """Sends rows between hosts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._nodes: list[int] = []

    @property
    def nodes(self) -> list[int]:
        """On which node each rank is. The first time all ranks ask."""
        if not self._nodes:
            self._nodes = self._world.gather(self._world.place.node, "which rank is on which node")
        return self._nodes

    def rate(self) -> float:
        """Bytes a second that a rank gets from other hosts while all ranks send; all call it."""
        size, here = _FIRST, self.nodes[self._world.rank]
        others = sum(node != here for node in self.nodes)
        self._send_zeros(size)  # which opens the connections
        while True:
            own_s = min(self._send_zeros(size) for _ in range(_TIMES))  # others may hold one up
            took: float = max(self._world.gather(own_s, "times of a link"))
            if took > _LONG_S or size >= _MOST:
                return size * max(1, others) / max(took, 1e-9)
            size *= 4

    def _send_zeros(self, size: int) -> float:
        own = self.nodes[self._world.rank]
        parts = [[torch.zeros(size, dtype=torch.uint8)] * (node != own) for node in self.nodes]
        began = perf_counter()
        self._world.exchange([], parts, "how fast hosts reach one another")
        return perf_counter() - began

    def bring(self, rows: FeatureRows, drawn: tuple[Numbers, Turns]) -> ReceivedRows:
        """Get what samples of an epoch lack here and another host has; all ranks call it."""
        world, store, began = self._world, rows.store, perf_counter()
        if len(set(world.gather(store.name, "what rows are of"))) > 1:
            return ReceivedRows()  # such as of other processors, whose rounding is another
        slots = np.unique(rows.samples.slots_of(*drawn))
        lacking = slots[:0] if store.is_full else slots[~store.knows(slots)]
        every = world.gather(lacking, "rows that hosts lack")
        asked = np.unique(np.concatenate(every))
        if not len(asked):
            return ReceivedRows()
        known = world.gather(np.packbits(store.knows(asked)), "rows that hosts have")
        has = [np.unpackbits(bits, count=len(asked)).astype(bool) for bits in known]
        lacks = [np.isin(asked, item) for item in every]
        sends = rows_to_send(world.rank, self.nodes, has, lacks)
        got, block = 0, max(1, _AT_ONCE * world.size // max(1, _width(store)))
        for start in range(0, len(asked), block):
            within = slice(start, start + block)
            parts = [_packed(store, asked[within][item[within]]) for item in sends]
            _, come = world.exchange([], parts, "rows of features for other hosts")
            got += sum(_kept(store, data) for data in come)
        # A rank of this host may need what another one has got.
        each = world.gather(got, "rows that came")
        own = sum(each[rank] for rank, node in enumerate(self.nodes) if node == world.place.node)
        return ReceivedRows(own, own * _width(store), perf_counter() - began)


def rows_to_send(
    rank: int,
    nodes: Sequence[int],
    has: Sequence[npt.NDArray[np.bool_]],
    lacks: Sequence[npt.NDArray[np.bool_]],
) -> list[npt.NDArray[np.bool_]]:
    """Which rows a rank sends to each: from all together a host gets each row that it lacks
    once.
    """
    places = np.arange(len(has[0]))
    ranks = {node: np.flatnonzero(np.equal(nodes, node)).tolist() for node in dict.fromkeys(nodes)}
    mine = ranks[nodes[rank]]
    held = np.stack([has[own[0]] for own in ranks.values()])
    before = held[: [*ranks].index(nodes[rank])].sum(0)  # so many earlier hosts have it too
    # Hosts that have it take turns, and so do their ranks and those of the host that lacks it.
    owners = np.maximum(1, held.sum(0))
    is_turn = has[mine[0]] & (before == places % owners)
    is_turn &= np.array(mine)[places // owners % len(mine)] == rank
    turns = places // len(nodes)
    result = [np.zeros(len(places), bool) for _ in nodes]
    for own in ranks.values():
        sends = np.logical_or.reduce([lacks[item] for item in own]) & ~has[own[0]] & is_turn
        for receiver in own:
            result[receiver] = sends & (np.array(own)[turns % len(own)] == receiver)
    return result


def _width(store: FeatureStore) -> int:
    return sum(part.width for part in store.row)


def _packed(store: FeatureStore, slots: Numbers) -> list[torch.Tensor]:
    slots = slots[store.has(slots)] if len(slots) else slots
    if not len(slots):
        return []
    parts = [part.cpu().contiguous() for part in store.get(slots)]
    return [torch.tensor([len(slots)]), torch.from_numpy(slots), *parts]


def _kept(store: FeatureStore, data: torch.Tensor) -> int:
    """Keep the rows that another rank has sent; how many there were."""
    if not len(data):
        return 0
    count = int(data[:8].view(torch.int64))
    slots = data[8 : 8 + 8 * count].view(torch.int64).numpy()
    at, values = 8 + 8 * count, []
    for part in store.row:
        size = count * part.width
        values.append(data[at : at + size].view(part.dtype).reshape(count, *part.shape))
        at += to_eight(size)
    store.put(slots, values)
    return count
