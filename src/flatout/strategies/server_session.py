"""How ranks and servers that compute nothing meet, and what the first rank tells a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flatout.strategies.server import groups_of, states_of
from flatout.strategies.server_layout import Layout, whole_state
from flatout.strategies.server_link import Link, answering
from flatout.world import Group, World, meeting, servers


def open_session(
    world: World,
    there: servers.Servers,
    told: Callable[[int], dict[str, Any]],
    ranks: Sequence[int],
    *,
    words: int,
    length: Callable[[int], int],
    dtype: torch.dtype,
) -> list[Link]:
    """The links to all servers, where this rank has some; all ranks call it."""
    store = servers.open_store(world.timeout_s)
    number = int(store.add("sessions", 1)) if world.is_first else 0
    number = world.from_first(number, "number of the servers' session")
    if world.is_first:
        store.set(f"session-{number}", f"{len(ranks)} {world.timeout_s}")
    result: list[Link] = []
    with world.within(world.begun(None, "parameter servers")):
        for server in range(there.size) if world.rank in ranks else ():
            with answering_of(server, there.size):
                pair = servers.pair_of(
                    *(store, number, server, ranks.index(world.rank)),
                    is_rank=True,
                    timeout_s=world.timeout_s,
                )
                if world.is_first:
                    pair.tell(told(server))
                link = Link(
                    pair,
                    same_node=there.are_here,
                    words=words,
                    length=length(server),
                    dtype=dtype,
                )
            result.append(link)
    return result


def optimizers_told(
    optimizers: Sequence[torch.optim.Optimizer], layouts: Sequence[Layout], server: int
) -> list[dict[str, Any]]:
    """Optimizers as a server has to know them, as plain data and tensors."""
    result: list[dict[str, Any]] = []
    for optimizer, layout in zip(optimizers, layouts, strict=True):
        states = layout.states(server, states_of(optimizer, layout))
        result.append(
            {
                "kind": type(optimizer).__name__,
                "groups": groups_of(optimizer, layout),
                "lengths": layout.lengths(server),
                "states": list(states.items()),
            }
        )
    return result


def parts_told(world: World, links: Sequence[Link], group: Group | None) -> list[torch.Tensor]:
    """The bytes that each server tells by `tell_parts`; all ranks call it.

    Of several ranks each gets a part from every server, before they gather all: so no link carries
    it more than twice.
    """
    by, own = (1, 0) if group is None else (len(group.ranks), group.own)
    with world.within(world.begun(None, "the servers' states")):
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in links]
        _receive(links, lengths)
        counts = [int(length) // by + (own < int(length) % by) for length in lengths]
        parts = [torch.empty(count, dtype=torch.uint8) for count in counts]
        _receive(links, parts)
        if not links or group is None:
            return parts
        each = meeting.gathered(group, parts)
        return [torch.cat(of_one) for of_one in zip(*each, strict=True)]


def _receive(links: Sequence[Link], into: Sequence[torch.Tensor]) -> None:
    works = [
        (server, link.pair.receive(item))
        for server, (link, item) in enumerate(zip(links, into, strict=True))
        if len(item)
    ]
    for server, work in works:
        with answering_of(server, len(links)):
            work.wait()


def whole_states(
    layout: Layout, by_server: Iterable[Iterable[tuple[int, dict[str, Any]]]]
) -> list[tuple[int, dict[str, Any]]]:
    """States of whole parameters, by their number, from what each server has of them."""
    pieces: dict[int, list[tuple[slice, dict[str, Any]]]] = {}
    for server, states in enumerate(by_server):
        for number, state in states:
            pieces.setdefault(number, []).append((layout.piece(number, server), state))
    return [(n, whole_state(layout.parameters[n], pieces[n])) for n in sorted(pieces)]


def answering_of(server: int, count: int) -> AbstractContextManager[None]:
    """Within, a server is waited for; by its number, of so many."""
    return answering(f"server {server} of {count}")
