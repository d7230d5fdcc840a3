"""Parameter servers that compute nothing, and wait for the gradients of all ranks.

As in parameter_server.py a server has a share of the weights and of the optimizer's state, and the
result is that of one rank. Here servers are processes of their own (`server_process.py`), where a
rank sends its gradients and each server alone adds them up. So a rank's link carries the gradients
once and the weights once, and where servers have hosts of their own, no rank's link carries those
of others. Of the ranks of one host one speaks for all (`server_tower.py`).

Where nothing of a step depends on all gradients together, a server sends the first weights back
while the last gradients still come. Two things may: clipping by norm, and gradients so large that
their sum might be infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from flatout.strategies.parameter_server import share_words, times_words
from flatout.strategies.replicas import check_replicas
from flatout.strategies.server import rates_of
from flatout.strategies.server_layout import (
    Layout,
    chunks_of,
    layout_of,
    numbers_of,
    place_of,
    state_beside,
)
from flatout.strategies.server_link import (
    END,
    GRADIENTS,
    STATES,
    STEP,
    TAKE,
    TIMES,
    VALUES,
    WHOLE_STEP,
    Link,
)
from flatout.strategies.server_refusals import check_known, check_served
from flatout.strategies.server_session import (
    answering_of,
    open_session,
    optimizers_told,
    parts_told,
    whole_states,
)
from flatout.strategies.server_tower import Tower, tower_of
from flatout.strategies.server_way import Way, gradient_of, length_of, way_of
from flatout.strategies.strategy import Strategy, Sums, Tensors
from flatout.world import Group, World, servers, unpack

HEAD = 3
"""Words of a message before rates and what is used: its kind, the optimizer, and a factor."""

# Of the numbers that ranks add up, behind the sums: how many have gradients that are too large, and
# how many have used each parameter.
_TOO_LARGE, _USED = 3, 4
# How far below infinity gradients have to be, and by how much they are multiplied at most.
_ROOM = 1e6
_END_S = 5.0


class ServersApart(Strategy):
    """Sends this rank's gradients to the servers and takes the weights that they send back.

    Args:
        world: of this rank.
        model: of this rank; the same on all when they begin.
        optimizers: what trains it.
        there: the servers.
        clip: largest norm of all gradients, and largest element, or None.
        say: gets a line about the shares.

    Raises:
        ModelError: something of the model or the optimizers cannot be served; what, and what to do
            instead.
        WorldError: the ranks' models are not the same.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        there: servers.Servers,
        clip: tuple[float | None, float | None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        check_served(model, optimizers, there.size, there.size)
        check_replicas(model, world, "at the start")
        self._world, self._optimizers, self._there, self._say = world, optimizers, there, say
        self._clip_norm, self._clip_value = clip
        self.across = self._measured_by_servers
        self._layouts: list[Layout] = []
        # Which ranks have links to the servers, and those that this one speaks for.
        self._leaders: Sequence[int] = range(world.size)
        self._tower: Tower | None = None
        self._group: Group | None = None
        self._links: list[Link] = []
        self._ways: list[list[Way]] = []  # by optimizer, then by server
        self._hooks: list[Any] = []
        self._known: set[torch.Tensor] = set()
        self._seen: Tensors = ()
        self._turn: list[int] = []
        self._samples = self._factor = 1.0
        self._is_whole = self._is_bad = False
        self._answers: list[torch.Tensor] = []
        self._used: dict[int, list[bool]] = {}
        self._versions: list[int] = []

    def begin(self) -> None:
        """Find the servers, and share the weights out."""
        for optimizer in self._optimizers:
            self._layouts.append(layout_of(optimizer, self._there.size))
        if not self._there.are_here and self._world.size > self._world.place.nodes:
            self._leaders, self._tower = tower_of(self._world)
        self._group = self._world.among(self._leaders)
        self._find()
        for place, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()  # the servers have it
            hook = optimizer.register_step_pre_hook(partial(self._step, place))
            self._hooks.append(hook)
        self._known = {p for layout in self._layouts for p in layout.parameters}
        where = "beside the ranks" if self._there.are_here else "on nodes of their own"
        towers = "; ranks of a host send as one" if len(self._leaders) < self._world.size else ""
        self._say(share_words(self._layouts, self._there.size) + f", {where}{towers}")

    def _find(self) -> None:
        self._words = HEAD + max(
            2 * len(optimizer.param_groups) + len(layout.parameters)
            for optimizer, layout in zip(self._optimizers, self._layouts, strict=True)
        )
        dtype = self._layouts[0].parameters[0].dtype
        self._links = open_session(
            self._world,
            self._there,
            self._told,
            self._leaders,
            words=self._words,
            length=lambda server: sum(length_of(layout, server) for layout in self._layouts),
            dtype=dtype,
        )
        self._ways = [[] for _ in self._layouts]
        for server in range(self._there.size):
            lengths = [length_of(layout, server) for layout in self._layouts]
            if self._links:
                up, down = self._links[server].up, self._links[server].down
            else:
                up, down = torch.zeros(2, sum(lengths), dtype=dtype)
            for layout, ways, end, length in zip(
                self._layouts, self._ways, accumulate(lengths), lengths, strict=True
            ):
                own = slice(end - length, end)
                way = way_of(layout, server, up[own], down[own])
                way.down.copy_(layout.weights(server))
                way.down_here.copy_(way.down)
                ways.append(way)

    def _told(self, server: int) -> dict[str, Any]:
        return {
            "optimizers": optimizers_told(self._optimizers, self._layouts, server),
            "words": self._words,
            "dtype": self._layouts[0].parameters[0].dtype,
            "clip_value": self._clip_value,
        }

    def _answering(self, server: int) -> AbstractContextManager[None]:
        return answering_of(server, self._there.size)

    # -- around a step -----------------------------------------------------------------------

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """A step begins: the servers go on with the weights of now.

        Raises:
            ModelError: an optimizer was given parameters since.
        """
        if parameters is not self._seen:
            check_known(parameters, self._known)
        self._seen = parameters
        self._turn = [place for place in range(len(self._layouts)) if turn >> place & 1]
        # Someone may have loaded other weights, on all ranks.
        if self._world.is_first and self._versions != self._versions_now():
            for place, layout in enumerate(self._layouts):
                for server, (link, way) in enumerate(
                    zip(self._links, self._ways[place], strict=True)
                ):
                    way.up.copy_(layout.weights(server))
                    with self._answering(server):
                        link.send(self._message(VALUES, place), way.up)
                        if link.is_shared:
                            link.words(1)

    def _versions_now(self) -> list[int]:
        return [p._version for layout in self._layouts for p in layout.parameters]

    def arm(self, own: Sums, samples: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """The next backward completes the gradients."""
        super().arm(own, samples, scaler)
        self._samples = samples

    @torch.no_grad()
    def finish(self) -> Sums:
        """Add up the losses; the servers get the gradients now where they must measure them."""
        trained = [p for place in self._turn for p in self._layouts[place].parameters]
        numbers = torch.zeros(_USED + len(trained), dtype=torch.float64)
        for at, number in enumerate(self._own):
            numbers[at] = float(number)
        used = [float(p.grad is not None) for p in trained]
        numbers[_USED:] = torch.tensor(used, dtype=numbers.dtype)
        self._lay_gradients()
        numbers[_TOO_LARGE] = float(self._clip_norm is not None or not self._are_small())
        self._world.sum(numbers, "sum of the losses")
        total, weight, votes, too_large = numbers[:_USED]
        self._factor = self._samples / float(weight) if weight else 1.0
        self._is_whole = not too_large and self._factor <= _ROOM
        each = iter((numbers[_USED:] > 0).tolist())
        for place in self._turn:
            self._used[place] = [next(each) for _ in self._layouts[place].parameters]
        self._answers.clear()
        if self._tower is not None:
            self._tower.add_up([way.up for place in self._turn for way in self._ways[place]])
        if not self._is_whole:
            self._exchange([(place, GRADIENTS) for place in self._turn], "gradients")
        device = trained[0].device
        return Sums(total.to(device), weight.to(device), votes)

    def _lay_gradients(self) -> None:
        for place in self._turn:
            gradients = [gradient_of(p) for p in self._layouts[place].parameters]
            for way in self._ways[place]:
                way.put(gradients)

    def _are_small(self) -> bool:
        ways = [way for place in self._turn for way in self._ways[place] if len(way.up)]
        most = torch.finfo(ways[0].up.dtype).max / _ROOM / self._world.size
        return all(float(torch.linalg.vector_norm(way.up, torch.inf)) <= most for way in ways)

    def _measured_by_servers(self, numbers: torch.Tensor) -> None:
        """Add whether gradients are not finite, and the square of their norm."""
        if not self._is_whole:
            measured = sum(self._answers, torch.zeros(2, dtype=torch.float64))
            if self._tower is not None:
                self._tower.share([measured], "size of the gradients")
            numbers += measured.to(numbers)
        self._is_bad = bool(numbers[0])
        if self._is_whole:
            return
        self._factor = 1.0
        if self._clip_norm is not None:
            self._factor = min(1.0, self._clip_norm / (float(numbers[1].sqrt()) + 1e-6))

    @torch.no_grad()
    def _step(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_bad:
            return
        rates = [rate for group in optimizer.param_groups for rate in rates_of(group)]
        kind = WHOLE_STEP if self._is_whole else STEP
        self._exchange([(place, kind)], "weights of the servers", [*rates, *self._used[place]])
        if self._tower is not None:
            self._tower.share([way.down for way in self._ways[place]], "weights of the servers")
        own = [numbers_of(p) for p in self._layouts[place].parameters]
        for way in self._ways[place]:
            way.take(own)
        self._versions = self._versions_now()

    def _exchange(self, what: list[tuple[int, int]], why: str, told: Sequence[float] = ()) -> None:
        """Send messages, with gradients where these belong to them, and take what is answered."""
        with self._world.within(self._world.begun(None, why)):
            works: list[tuple[int, Any]] = []
            for place, kind in what:
                message = self._message(kind, place, told)
                for server, link in enumerate(self._links):
                    with self._answering(server):
                        if kind != STEP or self._world.is_first:
                            works.append((server, link.pair.send(message)))
                works += self._begun(place, kind)
                if kind == GRADIENTS:
                    works += self._answers_begun()
            for server, work in works:
                with self._answering(server):
                    work.wait()
            for _, kind in what:
                for server, link in enumerate(self._links):
                    if link.is_shared and kind != GRADIENTS:
                        with self._answering(server):
                            link.words(1)

    def _begun(self, place: int, kind: int) -> list[tuple[int, Any]]:
        result: list[tuple[int, Any]] = []
        if not self._links:
            return result
        each = [chunks_of(len(way.up)) for way in self._ways[place]]
        for turn in range(max(map(len, each))):
            for server, (link, way) in enumerate(zip(self._links, self._ways[place], strict=True)):
                if link.is_shared or turn >= len(each[server]):
                    continue
                chunk = each[server][turn]
                with self._answering(server):
                    if kind != STEP:
                        result.append((server, link.pair.send(way.up[chunk])))
                    if kind != GRADIENTS:
                        result.append((server, link.pair.receive(way.down[chunk])))
        return result

    def _answers_begun(self) -> list[tuple[int, Any]]:
        result: list[tuple[int, Any]] = []
        for server, link in enumerate(self._links):
            self._answers.append(torch.zeros(2, dtype=torch.float64))
            with self._answering(server):
                result.append((server, link.pair.receive(self._answers[-1])))
        return result

    def _message(self, kind: int, place: int = 0, told: Sequence[float] = ()) -> torch.Tensor:
        words = torch.zeros(self._words, dtype=torch.float64)
        words[:HEAD] = torch.tensor([kind, place, self._factor], dtype=torch.float64)
        words[HEAD : HEAD + len(told)] = torch.tensor([*map(float, told)], dtype=torch.float64)
        return words

    # -- whole again -------------------------------------------------------------------------

    def _say_times(self) -> None:
        found: list[float] = []
        for server, link in enumerate(self._links if self._world.is_first else ()):
            with self._answering(server):
                link.send(self._message(TIMES))
                found.append(link.pair.hear())
        if words := times_words(found):
            self._say(words)

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """An optimizer's state, from the servers; all ranks call it.

        Where the first rank alone keeps it, the others get none.
        """
        place = place_of(optimizer, self._optimizers)
        to_all = any(self._world.gather(kept, "who keeps the servers' states")[1:])
        by = len(self._leaders) if to_all else 1
        for server, link in enumerate(self._links if self._world.is_first else ()):
            with self._answering(server):
                link.send(self._message(STATES, place, [by]))
        links = self._links if to_all or self._world.is_first else ()
        told = parts_told(self._world, links, self._group if to_all else None)
        if self._tower is not None and to_all:
            told = self._tower.hand_out(told, self._there.size, "the servers' states")
        whole = whole_states(self._layouts[place], map(unpack, told))
        return {**optimizer.state_dict(), "state": dict(whole)}

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Of an optimizer's whole state what this rank loads: nothing, the servers have it."""
        place = place_of(optimizer, self._optimizers)
        for server, link in enumerate(self._links if self._world.is_first else ()):
            own = self._layouts[place].states(server, state["state"])
            with self._answering(server):
                link.send(self._message(TAKE, place))
                link.pair.tell(list(own.items()))
        return {**state, "state": {}}

    def close(self, error: BaseException | None = None) -> None:
        """Let the optimizers step by themselves again, from the servers' states.

        After an error the servers may be gone: then the states are lost.
        """
        with ExitStack() as undone:
            for hook in self._hooks:
                undone.callback(hook.remove)
            if error is None and self._hooks:
                self._say_times()
                for optimizer, layout in zip(self._optimizers, self._layouts, strict=True):
                    states = self.state_of(optimizer, kept=True)["state"]
                    for number, state in states.items():
                        whole = layout.parameters[number]
                        optimizer.state[whole] = state_beside(optimizer, whole, state)
        self._hooks.clear()
        for link in self._links if self._world.is_first else ():
            with suppress(RuntimeError):  # that server has ended
                link.send_last(self._message(END), _END_S)
        self._links.clear()
