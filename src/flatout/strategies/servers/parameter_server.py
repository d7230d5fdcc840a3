"""A rank's side of parameter servers: links, shares and the optimizers' states.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014. Every rank has
the whole model and computes its part of each batch. The gradients of a share go to its server,
which steps the weights and sends them back. Only a server has the state of the optimizer for its
share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import accumulate
from threading import Lock, Thread
from typing import Any

import torch
from torch import nn

from flatout.strategies.servers.host_leader import Tower
from flatout.strategies.servers.layout import (
    Layout,
    layout_of,
    numbers_of,
    place_of,
    state_beside,
    whole_states,
)
from flatout.strategies.servers.link import END, HEAD, Link, answering
from flatout.strategies.servers.process import serve_in_thread
from flatout.strategies.servers.refusals import check_served
from flatout.strategies.servers.routes import Route, gradient_of, length_of, route_of
from flatout.strategies.servers.share import describe, rates_of
from flatout.strategies.strategy import Strategy
from flatout.words import rounded, size_words
from flatout.world import Group, World, barrier, servers, unpack

# Maximum seconds that a rank waits at the end for servers that may have failed.
_END_S = 5.0


class ParameterServer(Strategy):
    """Lets servers step the weights; a subclass decides when they do."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        count: int,
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._apart = servers.apart()
        self._count = count if self._apart is None else self._apart.size
        ranks = world.size if self._apart is None else self._count
        check_served(model, optimizers, self._count, ranks)
        self._world, self._model, self._optimizers, self._say = world, model, optimizers, say
        self._layouts: list[Layout] = []
        # _speakers: the ranks that have links. _tower: the ranks for which this rank sends.
        self._speakers: Sequence[int] = range(world.size)
        self._tower: Tower | None = None
        self._links: list[Link] = []
        self._routes: list[list[Route]] = []  # indexed by optimizer, then by server
        self._thread: Thread | None = None  # the thread in which this rank is a server
        self._hooks: list[Any] = []
        # Threads that read batches claim parts while the rank's own thread sends gradients.
        self._speaking = Lock()

    def begin(self) -> None:
        self._layouts = [layout_of(optimizer, self._count) for optimizer in self._optimizers]
        self._open_links()
        for place, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()  # the servers have the state
            self._hooks.append(optimizer.register_step_pre_hook(partial(self._step, place)))
        words = share_words(self._layouts, self._count)
        if self._apart is not None:
            words += f", {'beside the ranks' if self._apart.are_here else 'on nodes of their own'}"
        towers = "; ranks of a host send as one" if len(self._speakers) < self._world.size else ""
        self._say(words + towers)

    def _step(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        raise NotImplementedError

    def _policy(self) -> dict[str, Any]:
        raise NotImplementedError

    def _store(self) -> Any:
        if self._apart is None:
            return self._world.store("servers")
        return servers.open_store(self._world.timeout_s)

    def _open_links(self) -> None:
        world, apart, store = self._world, self._apart, self._store()
        session = int(store.add("sessions", 1)) if world.is_first else 0
        session = world.from_first(session, "number of the servers' session")
        nodes = world.gather(world.place.node, "nodes of the servers")
        is_here = [node == nodes[world.rank] for node in nodes[: self._count]]
        if apart is not None:
            is_here = [apart.are_here] * self._count
            if world.is_first:
                store.set(f"session-{session}", f"{len(self._speakers)} {world.timeout_s}")
        elif world.rank < self._count:
            are_here = [node == nodes[world.rank] for node in nodes]
            self._thread = serve_in_thread(
                self._store(), session, world.rank, are_here, world.timeout_s
            )
        words = HEAD + max(
            2 * len(optimizer.param_groups) + len(layout.parameters)
            for optimizer, layout in zip(self._optimizers, self._layouts, strict=True)
        )
        dtype = self._layouts[0].parameters[0].dtype
        with world.within(world.begun(None, "parameter servers")):
            for server in range(self._count) if world.rank in self._speakers else ():
                with self._answering(server):
                    pair = servers.pair_of(
                        *(store, session, server, self._speakers.index(world.rank)),
                        is_rank=True,
                        timeout_s=world.timeout_s,
                    )
                    if world.is_first:
                        pair.send_value(self._described(server, words, dtype))
                    length = sum(length_of(layout, server) for layout in self._layouts)
                    link = Link(
                        pair, same_node=is_here[server], words=words, length=length, dtype=dtype
                    )
                self._links.append(link)
        self._make_routes(dtype)

    def _described(self, server: int, words: int, dtype: torch.dtype) -> dict[str, Any]:
        each = zip(self._optimizers, self._layouts, strict=True)
        optimizers = [describe(optimizer, layout, server) for optimizer, layout in each]
        return {"optimizers": optimizers, "words": words, "dtype": dtype, **self._policy()}

    def _make_routes(self, dtype: torch.dtype) -> None:
        self._routes = [[] for _ in self._layouts]
        for server in range(self._count):
            lengths = [length_of(layout, server) for layout in self._layouts]
            if self._links:
                up, down = self._links[server].up, self._links[server].down
            else:
                up, down = torch.zeros(2, sum(lengths), dtype=dtype)
            for layout, routes, end, length in zip(
                self._layouts, self._routes, accumulate(lengths), lengths, strict=True
            ):
                own = slice(end - length, end)
                routes.append(route_of(layout, server, up[own], down[own]))

    def _answering(self, server: int) -> AbstractContextManager[None]:
        if self._apart is None:
            return answering(f"rank {server}, a parameter server,")
        return answering(f"server {server} of {self._count}")

    @property
    def _links_of_first(self) -> list[Link]:
        return self._links if self._world.is_first else []

    def _call(self, server: int, name: str, *arguments: Any) -> Any:
        with self._speaking, self._answering(server):
            self._links[server].begin_call(name, *arguments)
            return self._links[server].end_call()

    def _call_all(self, name: str, *arguments: Any) -> list[Any]:
        """Let the first rank call all servers; other ranks do nothing."""
        each = range(len(self._links_of_first))
        return [self._call(server, name, *arguments) for server in each]

    def _send_weights(self) -> None:
        for place, layout in enumerate(self._layouts):
            for server in range(len(self._links_of_first)):
                self._call(server, "weights", place, layout.weights(server).cpu())

    def _put_gradients(self, place: int) -> list[bool]:
        """Copy an optimizer's gradients to its routes, and return which parameters have one."""
        gradients = [gradient_of(p) for p in self._layouts[place].parameters]
        for route in self._routes[place]:
            route.put(gradients)
        return [gradient is not None for gradient in gradients]

    def _take_weights(self, place: int) -> None:
        own = [numbers_of(p) for p in self._layouts[place].parameters]
        for route in self._routes[place]:
            route.take(own)

    @staticmethod
    def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
        return [rate for group in optimizer.param_groups for rate in rates_of(group)]

    # -- whole again -------------------------------------------------------------------------

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """Return an optimizer's state from the servers. All ranks call this.

        If only the first rank keeps it, the other ranks get none.
        """
        place, world = place_of(optimizer, self._optimizers), self._world
        to_all = any(world.gather(kept, "who keeps the servers' states")[1:])
        group = world.among(self._speakers) if to_all else None
        workers = self._workers() if to_all else self._workers()[:1]
        with self._speaking:
            for server, link in enumerate(self._links_of_first):
                with self._answering(server):
                    link.begin_call("states", place, workers)
            parts = self._receive_states(self._links if to_all else self._links_of_first, group)
            for server, link in enumerate(self._links_of_first):
                with self._answering(server):
                    link.end_call()
        if self._tower is not None and to_all:
            parts = self._tower.hand_out(parts, self._count, "the servers' states")
        whole = whole_states(self._layouts[place], map(unpack, parts))
        return {**optimizer.state_dict(), "state": dict(whole)}

    def _workers(self) -> list[int]:
        return [*range(len(self._speakers))]

    def _receive_states(self, links: Sequence[Link], group: Group | None) -> list[torch.Tensor]:
        """Return the bytes that each server sends. All ranks call this.

        If several ranks need them, each rank gets a part from every server, and then all parts are
        gathered. So each link carries the bytes at most twice.
        """
        by, own = (1, 0) if group is None else (len(group.ranks), group.own)
        with self._world.within(self._world.begun(None, "the servers' states")):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in links]
            self._receive(links, lengths)
            counts = [int(length) // by + (own < int(length) % by) for length in lengths]
            parts = [torch.empty(count, dtype=torch.uint8) for count in counts]
            self._receive(links, parts)
            if not links or group is None:
                return parts
            each = barrier.gathered(group, parts)
            return [torch.cat(of_one) for of_one in zip(*each, strict=True)]

    def _receive(self, links: Sequence[Link], into: Iterable[torch.Tensor]) -> None:
        works = [
            (server, link.pair.receive(item))
            for server, (link, item) in enumerate(zip(links, into, strict=True))
            if len(item)
        ]
        for server, work in works:
            with self._answering(server):
                work.wait()

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state without its tensors, which are sent to the servers."""
        place = place_of(optimizer, self._optimizers)
        for server in range(len(self._links_of_first)):
            own = self._layouts[place].states(server, state["state"])
            self._call(server, "take_states", place, list(own.items()))
        return {**state, "state": {}}

    def close(self, error: BaseException | None = None) -> None:
        """Let the optimizers step by themselves again, from the servers' states.

        After an error the servers may be gone: then the states are lost.
        """
        with ExitStack() as undone:
            for hook in self._hooks:
                undone.callback(hook.remove)
            if error is None and self._hooks:
                if words := times_words(self._call_all("update_ms")):
                    self._say(words)
                for optimizer, layout in zip(self._optimizers, self._layouts, strict=True):
                    states = self.state_of(optimizer, kept=True)["state"]
                    for number, state in states.items():
                        whole = layout.parameters[number]
                        optimizer.state[whole] = state_beside(optimizer, whole, state)
        self._hooks.clear()
        for link in self._links:
            with suppress(RuntimeError):  # that server has ended
                link.send_last(link.message(END), _END_S)
        if self._thread is not None:
            self._thread.join(_END_S)
        self._links.clear()


def share_words(layouts: Sequence[Layout], servers: int) -> str:
    each = [0] * servers
    for layout in layouts:
        size = layout.parameters[0].element_size()
        for server in range(servers):
            each[server] += length_of(layout, server) * size
    who, does = (
        ("1 server has", "steps") if servers == 1 else (f"{servers} servers have each", "step")
    )
    share = size_words(max(each))
    return f"parameter_server: {who} {share} of the weights and {does} them for all"


def times_words(update_ms: Sequence[float]) -> str:
    """Return a line about the duration of each server's update, or "" if unknown."""
    known = [ms for ms in update_ms if ms]
    if not known:
        return ""
    least, most = rounded(min(known)), rounded(max(known))
    span = least if least == most else f"{least} to {most}"
    who = "a server" if len(known) == 1 else f"each of {len(known)} servers"
    return f"parameter_server: an update takes {who} {span} ms"
