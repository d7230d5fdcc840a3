"""Measures the network between the ranks that run it: pings, streams, and each reduction.

    flatout run --devices 2 probe.py        (a file that calls `main`)

All ranks call `probe`, and run the same operations in the same order. The first rank decides the
number of repetitions.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import isqrt
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from flatout.forecast.network import Collective, Link, Network
from flatout.recipe import World as Asked
from flatout.strategies import Flat, Reduction, reduction_of
from flatout.world import World, join

LADDER = tuple(4096 * 4**n for n in range(8))
"""Bytes of tensors, 4 KiB to 64 MiB, for a job whose buckets are unknown."""
LINE = "network "
"""Beginning of the line in which the first rank prints the network."""
# _LINKS_SHARE: share of the measurement's time for all links; _LINK_S: maximum seconds for one
# link.
_LINKS_SHARE, _LINK_S = 0.25, 4.0
# _PINGS: maximum number of pings of a link; _FEWEST_PINGS: minimum number.
_PINGS, _FEWEST_PINGS = 200, 5
# _BLOCK: bytes of a block of a stream; _ROUNDS: number of streams per link.
_BLOCK, _ROUNDS = 2**20, 5
# Number of a stream's blocks that are in flight: gloo sends a block only a round trip after the
# receiver has asked for that block.
_AHEAD = 16
# Maximum number of hosts of which all pairs are measured. Of more hosts, each is measured with the
# next host only.
_MOST_PAIRED = 8
# _FEWEST: minimum number of repetitions of a reduction; _MOST: maximum number.
_FEWEST, _MOST = 3, 40


def main(sizes: Sequence[int], seconds: float) -> None:
    world = join()
    result = probe(world, sizes, seconds)
    if world.is_first:
        print(LINE + result.model_dump_json(by_alias=True), flush=True)


def probe(world: World, sizes: Sequence[int], seconds: float) -> Network:
    """Return the network between these ranks; all of them call this function."""
    began = time.monotonic()
    places = world.gather([world.place.node, socket.gethostname()], "names of hosts")
    names = _names(places)
    first = [next(r for r, (n, _) in enumerate(places) if n == node) for node in range(len(names))]
    links = _links(world, names, first, _LINKS_SHARE * seconds)
    collectives = _collectives(world, len(names), sizes, began + seconds)
    return Network.model_validate(
        {"schema": 1, "hosts": names, "links": links, "collectives": collectives}
    )


def _names(places: Sequence[Any]) -> list[str]:
    by_node = dict(reversed(places))
    names = [by_node[node] for node in sorted(by_node)]
    if len(set(names)) < len(names):
        names = [f"{name}-{number}" for number, name in enumerate(names)]
    return names


# -- links -----------------------------------------------------------------------------------------


def _links(world: World, names: list[str], first: list[int], seconds: float) -> list[Link]:
    hosts = range(len(names))
    pairs = list(combinations(hosts, 2))
    if len(names) > _MOST_PAIRED:
        pairs = [(host, (host + 1) % len(names)) for host in hosts]
    each = min(_LINK_S, seconds / max(1, len(pairs)))
    result = []
    for item, other in pairs:
        figures = None
        if world.rank in (first[item], first[other]):
            figures = _link(world.rank == first[item], first[item], first[other], each)
        figures_of = world.gather(figures, f"the link of {names[item]} and {names[other]}")
        rtt, rate = figures_of[first[item]]
        result.append(Link(between=(names[item], names[other]), rtt_s=rtt, bytes_per_s=rate))
    return result


def _link(begins: bool, value: int, other: int, seconds: float) -> list[float]:
    small, block = torch.zeros(1, dtype=torch.int64), torch.zeros(_BLOCK, dtype=torch.uint8)
    peer = other if begins else value

    def pass_on(tensor: torch.Tensor, *, there: bool) -> None:
        if there == begins:
            dist.send(tensor, peer)
        else:
            dist.recv(tensor, peer)

    def agreed(number: int) -> int:
        small[0] = number
        pass_on(small, there=True)
        return int(small)

    def trip() -> float:
        began = time.perf_counter()
        pass_on(small, there=True)
        pass_on(small, there=False)
        return time.perf_counter() - began

    def stream(blocks: int) -> float:
        begin = dist.isend if begins else dist.irecv
        began = time.perf_counter()
        on_the_way: deque[Any] = deque()
        for _ in range(blocks):
            on_the_way.append(begin(block, peer))
            if len(on_the_way) == _AHEAD:
                on_the_way.popleft().wait()
        for work in on_the_way:
            work.wait()
        pass_on(small, there=False)  # all blocks have arrived
        return time.perf_counter() - began

    trip()
    slow = max(trip() for _ in range(2))
    pings = agreed(int(min(_PINGS, max(_FEWEST_PINGS, seconds / 4 / slow))))
    rtt = median(trip() for _ in range(pings))
    took = stream(2)
    blocks = agreed(int(min(256, max(2, 2 * seconds / 2 / _ROUNDS / took))))
    rate = median(blocks * _BLOCK / max(1e-9, stream(blocks) - rtt / 2) for _ in range(_ROUNDS))
    return [rtt, rate]


# -- collectives -----------------------------------------------------------------------------------


def reductions(hosts: int, ranks: int) -> dict[str, Asked]:
    result = {"all_reduce": Asked(reduction="all_reduce"), "ring": Asked(reduction="ring")}
    result["to_one"] = Asked(reduction="to_one")
    if hosts == 1:
        result["shared"] = Asked(reduction="shared")
    elif ranks > hosts:
        result["hierarchical"] = Asked(reduction="hierarchical")
    for name in ("bf16", "fp16", "powersgd"):
        result[name] = Asked(reduction="all_reduce", compression=name)
    return result


def _collectives(world: World, hosts: int, sizes: Sequence[int], end: float) -> list[Collective]:
    made = {
        name: reduction_of(asked, world, torch.device("cpu"))
        for name, asked in reductions(hosts, world.size).items()
    }
    result = []
    left = len(made) * len(sizes)
    slow: dict[str, float] = {}  # seconds per byte
    for number, size in enumerate(sorted(sizes)):
        for name, reduction in made.items():
            room = (end - time.monotonic()) / left
            left -= 1
            # The first rank's clock decides for all.
            if world.from_first(slow.get(name, 0.0) * size > max(room, 0.0) * len(made)):
                continue
            seconds = _timed(world, reduction, number, size, room)
            slow[name] = min(seconds) / size
            result.append(
                Collective(
                    op="all_reduce",
                    reduction=name,
                    ranks=world.size,
                    hosts=hosts,
                    bytes=size,
                    seconds=seconds,
                )
            )
    return result


def _timed(world: World, reduction: Reduction, number: int, size: int, room: float) -> list[float]:
    length = max(1, size // 4)
    values = reduction.memory(number, length, torch.float32, torch.device("cpu"))
    side = isqrt(length)
    shapes = [(side, length // side), (1, length - side * (length // side))]
    flat = Flat(values, number, shapes)

    def once() -> float:
        values.fill_(1.0)
        world.wait("the next sum")
        began = time.perf_counter()
        reduction.add_up(flat)
        return time.perf_counter() - began

    with torch.no_grad():
        first = once()  # the first call includes one-time setup
        times = world.from_first(int(min(_MOST, max(_FEWEST, room / max(first, 1e-6)))))
        own = [once() for _ in range(times)]
    return [max(each) for each in zip(*world.gather(own, "times of sums"), strict=True)]
