"""Processes of a job that are only parameter servers and compute nothing.

`flatout run --servers` starts them after the ranks: on the same node as the ranks, or one on each
of the last nodes. A rank's environment counts only the ranks, so that its World has only processes
that compute. Servers and ranks meet at the job's store.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any, NamedTuple

from flatout.world.network import INTERFACES
from flatout.world.pair import Pair, open_pair
from flatout.world.place import SERVERS, Place, place, restarts
from flatout.world.stores import connect, part_of

OVER = "over"
"""A key in the servers' store, set once the first rank's script has ended."""


class Servers(NamedTuple):
    """The servers of a job, as a rank knows them."""

    size: int
    are_here: bool


def apart() -> Servers | None:
    """Return, on a rank, the separate servers of the job, or None."""
    words = os.environ.get(SERVERS, "").split()
    return Servers(int(words[0]), words[1] == "here") if len(words) == 2 else None


def number_of(here: Place) -> int | None:
    """Return the number of a server process in a job with servers, or None for a rank."""
    number = here.rank - (here.world_size - int(os.environ[SERVERS]))
    return number if number >= 0 else None


def become_rank(here: Place, env: MutableMapping[str, str]) -> None:
    # A single number is the value that the launcher has set.
    count, are_here = int(env[SERVERS]), here.nodes == 1
    env["WORLD_SIZE"] = str(here.world_size - count)
    env["LOCAL_WORLD_SIZE"] = str(here.local_world_size - count * are_here)
    env["GROUP_WORLD_SIZE"] = str(1 if are_here else here.nodes - count)
    env.setdefault("GROUP_RANK", str(here.node))
    env[SERVERS] = f"{count} {'here' if are_here else 'apart'}"


def become_server(here: Place, env: MutableMapping[str, str]) -> None:
    if here.nodes == 1:
        for variable in INTERFACES:
            env.setdefault(variable, "lo")


def open_store(timeout_s: float) -> Any:
    there = connect(place(), timedelta(seconds=timeout_s))
    return part_of(there, f"flatout-servers-{restarts()}")


def pair_of(
    store: Any, session: int, server: int, rank: int, *, is_rank: bool, timeout_s: float
) -> Pair:
    own = part_of(store, f"{session}-{server}-{rank}")
    return open_pair(own, int(is_rank), timeout_s)
