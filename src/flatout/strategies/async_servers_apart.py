"""Parameter servers that compute nothing and do not wait for the gradients of all ranks.

They do what those of async_server.py do, in processes of their own (`server_process.py`). What
there the first rank asks its own server, here it asks the first of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from flatout.strategies.async_server import AsyncParameterServer
from flatout.strategies.server import Server
from flatout.strategies.server_layout import place_of
from flatout.strategies.server_link import CALL
from flatout.strategies.server_session import (
    answering_of,
    open_session,
    optimizers_told,
    parts_told,
    whole_states,
)
from flatout.strategies.server_way import length_of
from flatout.world import World, dropped, servers, unpack


class AsyncServersApart(AsyncParameterServer):
    """Sends this rank's gradients to the servers and goes on with the weights that they answer.

    Args:
        world: of this rank.
        model: of this rank; the same on all when they begin.
        optimizers: what trains it.
        there: the servers.
        staleness: how many steps a worker may be ahead of the slowest; None sets no bound.
        spare: for how many workers no step waits; 0 where each gradient is a step of its own.
        say: gets a line about the shares.

    Raises:
        ModelError: something of the model or the optimizers cannot be served; what, and what to do
            instead.
        WorldError: there are several servers with spare workers, or all ranks are spare.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        there: servers.Servers,
        staleness: int | None,
        spare: int,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(world, model, optimizers, there.size, staleness, spare, say)
        self._there = there
        self._told: list[dict[str, Any]] = []

    def _make_server(self) -> Server | None:
        if self._world.is_first:
            self._told = [self._told_to(server) for server in range(self._servers)]
        return None

    def _told_to(self, server: int) -> dict[str, Any]:
        return {
            "optimizers": optimizers_told(self._optimizers, self._layouts, server),
            "words": self._words_of_all(),
            "dtype": self._layouts[0].parameters[0].dtype,
            "ids": [*self._ids],
            "times": dropped.times(),
            "staleness": self._staleness,
            "spare": self._spare,
        }

    def _find(self) -> None:
        """Make a link to each server; those of ranks that are left stay."""
        self._length = self._words_of_all()
        links = open_session(
            self._world,
            self._there,
            self._told.__getitem__,
            range(self._world.size),
            words=self._length,
            length=lambda server: max(length_of(layout, server) for layout in self._layouts),
            dtype=self._layouts[0].parameters[0].dtype,
        )
        self._told.clear()
        self._links = dict(enumerate(links))
        self._ways = [
            {server: self._way(layout, server) for server in self._links}
            for layout in self._layouts
        ]

    def _serve(self) -> None:
        self._is_serving = True
        for place, layout in enumerate(self._layouts):
            for server in self._links if self._world.is_first else ():
                self._call(server, "weights", place, layout.weights(server).cpu())
        self._world.wait("all servers are there")

    def _call(self, server: int, name: str, *arguments: Any) -> Any:
        with self._speaking:
            self._begin_call(server, name, *arguments)
            return self._end_call(server)

    def _begin_call(self, server: int, name: str, *arguments: Any) -> None:
        with self._named(server):
            self._links[server].send(self._words(CALL))
            self._links[server].pair.tell([name, *arguments])

    def _end_call(self, server: int) -> Any:
        with self._named(server):
            return self._links[server].pair.hear()

    def _tell_servers(self, name: str, *arguments: Any) -> None:
        for server in self._links if self._world.is_first else ():
            self._call(server, name, *arguments)

    def _of_first_server(self, name: str) -> Any:
        return self._call(0, name)

    def _named(self, server: int) -> AbstractContextManager[None]:
        return answering_of(server, self._servers)

    def _update_ms(self) -> list[float]:
        first = self._links if self._world.is_first else ()
        return [self._call(server, "update_ms") for server in first]

    def _may_end(self) -> list[int]:
        # The first rank speaks for all.
        return [*self._ids[1:]]

    def _go_on_with(self, met: list[int]) -> None:
        lost = [self._ids[item] for item in self._met if item not in met]
        self._met = met
        self._world.go_on_with([self._ids[item] for item in met])
        self._begin_without(lost)

    # -- whole again -------------------------------------------------------------------------

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """An optimizer's state, from the servers; all ranks call it."""
        place, world = place_of(optimizer, self._optimizers), self._world
        # The others may want none, as for a checkpoint that the first rank writes.
        to_all = any(world.gather(kept, "who keeps the servers' states")[1:])
        group = world.among(range(world.size)) if to_all else None
        first = self._links if world.is_first else ()
        with self._speaking:
            for server in first:
                self._begin_call(server, "states", place, self._met if to_all else self._met[:1])
            links = [*self._links.values()] if to_all or world.is_first else []
            told = parts_told(world, links, group)
            for server in first:
                self._end_call(server)
        whole = whole_states(self._layouts[place], map(unpack, told))
        return {**optimizer.state_dict(), "state": dict(whole)}

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Of an optimizer's whole state what this rank loads: nothing, the servers have it."""
        place = place_of(optimizer, self._optimizers)
        for server in self._links if self._world.is_first else ():
            own = self._layouts[place].states(server, state["state"])
            self._call(server, "take_states", place, own)
        return {**state, "state": {}}

    def close(self, error: BaseException | None = None) -> None:
        """Let the optimizers step by themselves again, from the servers' states.

        After an error the servers may be gone: then the states are lost.
        """
        self._is_serving = bool(self._links)  # they wait for the end of it, steps or none
        super().close(error)
        self._links.clear()
