"""Some ranks are parameter servers: each steps its share of the weights for all.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014. Every rank has
the whole model and computes its part of each batch; the gradients of a share go to its server,
which adds them up, steps the weights and sends them back. Only a server has the state of the
optimizer for its share. As in ddp.py the gradients are those of loss sums, and what they are
divided by travels beside them, so the result is that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from flatout.strategies.replicas import check_replicas
from flatout.strategies.server_layout import (
    Layout,
    layout_of,
    numbers_of,
    part_of_state,
    place_of,
    state_beside,
    whole_state,
)
from flatout.strategies.server_refusals import check_known, check_served
from flatout.strategies.server_way import gradient_of
from flatout.strategies.strategy import Strategy, Sums, Tensors
from flatout.words import rounded, size_words
from flatout.world import World

# Of the numbers that travel, behind the sums: whether a rank has used each parameter.
_USED = 3


class _Served(NamedTuple):
    """The parameters of an optimizer.

    Attributes:
        layout: which server has what.
        parts: of each parameter what this rank has as a server, in the parameter's own memory;
            empty where it has none. The optimizer steps these.
        flat: gradients on their way to the servers, and weights on their way back, one server's
            range after the other.
        whole: all pieces of the parameters, as `Layout.whole` gives them of `flat`.
        sums: of `parts`, within; empty where they are.
    """

    layout: Layout
    parts: list[nn.Parameter]
    flat: torch.Tensor
    whole: list[tuple[int, slice, torch.Tensor]]
    sums: list[torch.Tensor]


class ParameterServer(Strategy):
    """Lets servers step the weights, each its share, when the gradients of all ranks are there.

    Args:
        world: of this rank.
        model: of this rank; the same on all.
        optimizers: what trains it.
        servers: how many ranks are servers, from the first on.
        say: gets a line about the shares.

    Raises:
        ModelError: something of the model or the optimizers cannot be served; what, and what to do
            instead.
        WorldError: the ranks' models are not the same, or there are more servers than ranks.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        servers: int,
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        check_served(model, optimizers, servers, world.size)
        check_replicas(model, world, "at the start")
        self._world, self._optimizers, self._servers, self._say = world, optimizers, servers, say
        self.across = self._sum_over_servers
        self._served: list[_Served] = []
        self._turn: list[_Served] = []
        self._known: set[torch.Tensor] = set()
        self._seen: Tensors = ()

    @property
    def _ranges(self) -> range:
        return range(self._servers)

    def begin(self) -> None:
        """Share the weights out, and say how much each server has."""
        for optimizer in self._optimizers:
            layout = layout_of(optimizer, self._servers)
            own: list[Any] = layout.parameters
            pieces = [self._piece(layout, number) for number in range(len(own))]
            parts = [
                nn.Parameter(numbers_of(p)[piece], requires_grad=p.requires_grad)
                for p, piece in zip(own, pieces, strict=True)
            ]
            flat = torch.zeros(layout.length, dtype=own[0].dtype, device=own[0].device)
            sums = [flat[:0]] * len(own)
            if self._world.rank < self._servers:
                mine = layout.range(self._world.rank)
                sums = layout.pieces(flat[mine], self._world.rank)
            self._served.append(_Served(layout, parts, flat, layout.whole(flat), sums))
            for number, (p, part) in enumerate(zip(own, parts, strict=True)):
                state = optimizer.state.pop(p, None)
                if state and len(part):
                    optimizer.state[part] = {
                        k: part_of_state(v, p, pieces[number]) for k, v in state.items()
                    }
            _exchange(optimizer, dict(zip(own, parts, strict=True)))
        self._known = {part for served in self._served for part in served.parts}
        self._say(share_words([served.layout for served in self._served], self._servers))

    def _piece(self, layout: Layout, number: int) -> slice:
        rank = self._world.rank
        return layout.piece(number, rank) if rank < self._servers else slice(0, 0)

    # -- around a step -----------------------------------------------------------------------

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """A step begins: no gradients of other losses count.

        Raises:
            ModelError: an optimizer was given parameters since.
        """
        if parameters is not self._seen:
            check_known(parameters, self._known)
        self._seen = parameters
        self._turn = [served for place, served in enumerate(self._served) if turn >> place & 1]
        for served in self._turn:
            for parameter in served.layout.parameters:
                parameter.grad = None

    @torch.no_grad()
    def finish(self) -> Sums:
        """Add up the losses, and on each server the gradients of its share."""
        trained = [p for served in self._turn for p in served.layout.parameters]
        used = [float(p.grad is not None) for p in trained]
        numbers = torch.zeros(_USED + len(trained), dtype=torch.float64, device=trained[0].device)
        for place, number in enumerate(self._own):
            numbers[place] = number
        numbers[_USED:] = torch.tensor(used, dtype=numbers.dtype)
        losses = self._world.sum(numbers, "sum of the losses", later=True)
        waiting = [losses]
        for served in self._turn:
            _gather_gradients(served)
            for server in self._ranges:
                piece = served.flat[served.layout.range(server)]
                if len(piece):
                    work = dist.reduce(piece, dst=server, async_op=True)
                    waiting.append(self._world.begun(work, f"gradients for server {server}"))
        for later in waiting:
            assert later is not None
            self._world.until_done(later)
        # What this rank has used is used. Only where something is missing must it know more.
        if not all(used):
            assert losses is not None
            with self._world.within(losses):
                used = numbers[_USED:].tolist()
        each = iter(used)
        for served in self._turn:
            for part, own in zip(served.parts, served.sums, strict=True):
                # Where no rank has a gradient, there is none.
                is_used = next(each) > 0
                part.grad = own if len(part) and is_used else None
        total, weight, votes = numbers[:_USED]
        return Sums(total, weight, votes)

    def _sum_over_servers(self, numbers: torch.Tensor) -> None:
        self._world.sum(numbers, "size of the gradients, and whether they are finite")

    @torch.no_grad()
    def after_step(self) -> bool:
        """The servers have stepped: their weights go to all ranks."""
        waiting = []
        for served in self._turn:
            if self._world.rank < self._servers:
                torch._foreach_copy_(served.sums, [part.detach() for part in served.parts])
            for server in self._ranges:
                piece = served.flat[served.layout.range(server)]
                if len(piece):
                    work = dist.broadcast(piece, src=server, async_op=True)
                    waiting.append(self._world.begun(work, f"weights of server {server}"))
        for later in waiting:
            self._world.until_done(later)
        for served in self._turn:
            numbers = [numbers_of(p) for p in served.layout.parameters]
            own = [numbers[number][cut] for number, cut, _ in served.whole]
            torch._foreach_copy_(own, [place for *_, place in served.whole])
        return False

    # -- whole again -------------------------------------------------------------------------

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """An optimizer's state, whole; all ranks call it."""
        served = self._served[place_of(optimizer, self._optimizers)]
        state = optimizer.state_dict()
        whole = gathered_states(self._world, served.layout, state["state"], self._servers)
        return {**state, "state": whole}

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Of an optimizer's whole state what this rank loads."""
        layout = self._served[place_of(optimizer, self._optimizers)].layout
        own: dict[int, Any] = {}
        for number, values in state["state"].items():
            piece, whole = self._piece(layout, number), layout.parameters[number]
            if piece.stop > piece.start:
                own[number] = {k: part_of_state(v, whole, piece) for k, v in values.items()}
        return {**state, "state": own}

    def close(self, error: BaseException | None = None) -> None:
        """Give the optimizers the model's parameters back, with their whole state.

        After an error there may be no ranks to gather it from: then all stays as it is.
        """
        if not self._served or error is not None:
            return
        states = [self.state_of(optimizer, kept=True) for optimizer in self._optimizers]
        for optimizer, served, state in zip(self._optimizers, self._served, states, strict=True):
            own: list[Any] = served.layout.parameters
            for part in served.parts:
                optimizer.state.pop(part, None)
            _exchange(optimizer, dict(zip(served.parts, own, strict=True)))
            for number, values in state["state"].items():
                optimizer.state[own[number]] = state_beside(optimizer, own[number], values)
        self._served.clear()


def share_words(layouts: Sequence[Layout], servers: int) -> str:
    """A line about what each server has."""
    each = [0] * servers
    for layout in layouts:
        size = layout.parameters[0].element_size()
        for server in range(servers):
            own = layout.range(server)
            each[server] += (own.stop - own.start) * size
    who, does = (
        ("1 server has", "steps") if servers == 1 else (f"{servers} servers have each", "step")
    )
    share = size_words(max(each))
    return f"parameter_server: {who} {share} of the weights and {does} them for all"


def times_words(update_ms: Sequence[float]) -> str:
    """A line about how long each server's update takes; "" where that is not known."""
    known = [ms for ms in update_ms if ms]
    if not known:
        return ""
    least, most = rounded(min(known)), rounded(max(known))
    span = least if least == most else f"{least} to {most}"
    who = "a server" if len(known) == 1 else f"each of {len(known)} servers"
    return f"parameter_server: an update takes {who} {span} ms"


def gathered_states(
    world: World, layout: Layout, own: dict[int, dict[str, Any]], servers: int
) -> dict[int, dict[str, Any]]:
    """The state of an optimizer, by the number of its parameter, from all servers.

    All ranks call it.
    """
    told = [[number, state] for number, state in own.items()]
    pieces: dict[int, list[tuple[slice, dict[str, Any]]]] = {}
    for server, states in enumerate(world.gather(told, "the servers' states")[:servers]):
        for number, state in states:
            pieces.setdefault(number, []).append((layout.piece(number, server), state))
    return {n: whole_state(layout.parameters[n], pieces[n]) for n in sorted(pieces)}


def _gather_gradients(served: _Served) -> None:
    """Put a rank's gradients into one piece of memory; what has none counts as zero."""
    gradients = [gradient_of(parameter) for parameter in served.layout.parameters]
    places, own = [], []
    for number, cut, place in served.whole:
        gradient = gradients[number]
        if gradient is None:
            place.zero_()
            continue
        places.append(place)
        own.append(gradient[cut])
    if places:
        torch._foreach_copy_(places, own)


def _exchange(optimizer: torch.optim.Optimizer, instead: dict[nn.Parameter, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [instead[p] for p in group["params"]]
