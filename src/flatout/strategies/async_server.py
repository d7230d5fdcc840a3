"""Parameter servers that do not wait: a worker's gradient is a step as soon as it is there.

Dean et al., "Large Scale Distributed Deep Networks", 2012. Each rank is a worker that computes its
part of each batch, sends the gradient of its mean loss to the servers and goes on with the weights
that they answer; they are those of all workers' steps up to then. The servers are threads beside
the first ranks' own steps. Other steps were made since the weights of a gradient were read: so many
steps it is stale. All are alike where they meet: at the end of an epoch, and before evaluating and
saving.

Between two meetings the first server hands out parts of batches to the workers that ask for them,
so that one that is slow takes fewer; where the source of the batches does not let it, each has its
own part of each batch.

A worker clips its own gradient, and one with a NaN is not sent.

A worker that is killed meanwhile is dropped: others get the parts that it had claimed, and the
ranks that are left go on by themselves from where they meet.

With spare workers, servers wait for all but so many of the gradients of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn

from flatout.strategies.parameter_server import gathered_states, share_words, times_words
from flatout.strategies.server import Push, Server, rates_of, share_of
from flatout.strategies.server_answers import HEAD, Answers
from flatout.strategies.server_layout import (
    Layout,
    layout_of,
    numbers_of,
    place_of,
    state_beside,
)
from flatout.strategies.server_link import (
    CLAIM,
    CLOSE,
    END,
    MEET,
    PULL,
    PUSH,
    REST,
    TICK,
    Link,
    answering,
)
from flatout.strategies.server_refusals import check_served, check_spare
from flatout.strategies.server_spare import SpareServer
from flatout.strategies.server_way import Way, gradient_of, length_of, way_of
from flatout.strategies.strategy import Strategy, Sums, Tensors
from flatout.words import counted
from flatout.world import Pair, World, dropped

# How long a server waits for the last words of workers that may have failed.
_END_S = 5.0


class AsyncParameterServer(Strategy):
    """Sends this rank's gradients to the servers, and is one of them on the first ranks.

    Args:
        world: of this rank.
        model: of this rank; the same on all when they begin.
        optimizers: what trains it.
        servers: how many ranks are servers, from the first on.
        staleness: how many steps a worker may be ahead of the slowest; None sets no bound.
        spare: for how many workers no step waits; 0 where each gradient is a step of its own.
        say: gets a line about the shares.

    Attributes:
        since: steps since the ranks have met.
        parts: of a batch: as many as there are ranks at the start.

    Raises:
        ModelError: something of the model or the optimizers cannot be served; what, and what to do
            instead.
        WorldError: there are more servers than ranks, or all ranks are spare.
    """

    steps_apart = True
    shares_epochs = True

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        servers: int,
        staleness: int | None,
        spare: int,
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        check_served(model, optimizers, servers, world.size)
        check_spare(spare, servers, world.size)
        self._world, self._model, self._optimizers = world, model, optimizers
        self._servers, self._staleness, self._spare, self._say = servers, staleness, spare, say
        self._layouts: list[Layout] = []
        self._ways: list[dict[int, Way]] = []
        self._is_on_cpu = all(parameter.is_cpu for parameter in model.parameters())
        self._server: Server | None = None
        self._links: dict[int, Link] = {}
        self._ends: dict[int, Link] = {}
        self._answers: Answers | None = None
        self._hooks: list[Any] = []
        self._is_serving = False
        self._vote = 0.0
        self._steps, self._stop_at = 0, 0
        self.since = 0
        self.parts, self._part = world.size, -1
        # The ranks are called by their numbers of now also after some have ended.
        self._ids, self._met = world.ids, list(range(world.size))
        # Threads that read batches claim them while the rank's own sends gradients.
        self._speaking = Lock()
        self._before_section: int | None = None  # steps, while parts are handed out

    def begin(self) -> None:
        """Share the weights out, and find the servers."""
        for optimizer in self._optimizers:
            self._layouts.append(layout_of(optimizer, self._servers))
        self._server = self._make_server()
        for optimizer in self._optimizers:
            optimizer.state.clear()  # the servers have it
        self._find()
        if self._server is not None:
            groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
            given = (self._length, groups, self._ids, self._world.timeout_s)
            self._answers = Answers(self._server, *given)
        self._hooks = [
            optimizer.register_step_pre_hook(partial(self._push, place))
            for place, optimizer in enumerate(self._optimizers)
        ]
        self._say(share_words(self._layouts, self._servers))

    def _make_server(self) -> Server | None:
        if self._world.rank >= self._servers:
            return None
        shares = [
            share_of(optimizer, layout, self._world.rank)
            for optimizer, layout in zip(self._optimizers, self._layouts, strict=True)
        ]
        if self._spare:
            return SpareServer(shares, self._world.size, self._spare, self._world.timeout_s)
        return Server(shares, self._world.size, self._staleness, self._world.timeout_s)

    def _find(self) -> None:
        """Make a link between each worker and each server on another rank."""
        world = self._world
        nodes = world.gather(world.place.node, "nodes of the servers")
        words = self._words_of_all()
        for server in range(self._servers):
            for worker in range(world.size):
                group = None if worker == server else world.among((server, worker))
                if group is None:
                    continue
                sizes = [length_of(layout, server) for layout in self._layouts]
                link = Link(
                    Pair(group.channel, group.own),
                    same_node=nodes[server] == nodes[worker],
                    words=words,
                    length=max(sizes),
                    dtype=self._layouts[0].parameters[0].dtype,
                )
                if world.rank == worker:
                    self._links[server] = link
                else:
                    self._ends[self._met[worker]] = link
        self._length = words
        self._ways = [
            {server: self._way(layout, server) for server in range(self._servers)}
            for layout in self._layouts
        ]

    def _way(self, layout: Layout, server: int) -> Way:
        length, link = length_of(layout, server), self._links.get(server)
        if link is None:
            up, down = torch.zeros(2, length, dtype=layout.parameters[0].dtype)
        else:
            up, down = link.up[:length], link.down[:length]
        return way_of(layout, server, up, down)

    def _words_of_all(self) -> int:
        return HEAD + max(
            2 * len(optimizer.param_groups) + len(layout.parameters)
            for optimizer, layout in zip(self._optimizers, self._layouts, strict=True)
        )

    def _serve(self) -> None:
        """Begin with the weights of now, and answer the workers from here on."""
        self._is_serving = True
        if self._server is not None:
            for share, layout in zip(self._server.shares, self._layouts, strict=True):
                share.values.copy_(layout.weights(self._world.rank))
        self._answer_all()
        self._world.wait("all servers are there")

    def _answer_all(self) -> None:
        if self._answers is not None:
            self._answers.start(self._ends)

    def _tell_servers(self, name: str, *arguments: Any) -> None:
        if self._answers is not None:
            self._answers.called(name, *arguments)

    def _of_first_server(self, name: str) -> Any:
        return self._answers.called(name) if self._answers is not None else None

    def _update_ms(self) -> list[float]:
        server = self._server
        own = 0.0 if server is None else sum(share.update_ms() for share in server.shares)
        return self._world.gather(own, "times of the servers")[: self._servers]

    @property
    def _first(self) -> Server | None:
        return self._server if self._world.is_first else None

    # -- around a step -----------------------------------------------------------------------

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """A step begins, before anything changes."""
        if not self._is_serving:
            self._serve()

    def finish(self) -> Sums:
        """This rank's own sums: it steps alone."""
        self._vote = float(self._own.votes)
        if not self._own.weight:  # no sample of this rank's counts
            for layout in self._layouts:
                for parameter in layout.parameters:
                    parameter.grad = None
        return self._own._replace(votes=0.0)

    @torch.no_grad()
    def _push(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [gradient_of(p) for p in self._layouts[place].parameters]
        for way in self._ways[place].values():
            way.put(gradients)
        used = [gradient is not None for gradient in gradients]
        # On a GPU no one has waited for the check.
        ups = [] if self._is_on_cpu else [way.up for way in self._ways[place].values()]
        if not all(bool(torch.isfinite(up).all()) for up in ups):
            used = []
        rates = [rate for group in optimizer.param_groups for rate in rates_of(group)]
        is_apart = self._before_section is None
        self._steps += is_apart
        # Where parts are handed out, that is closed by the one who wants to stop.
        vote = bool(self._vote) and is_apart
        weight = float(self._own.weight)
        used = used if any(used) else []
        push = Push(place, self._steps, weight, vote, rates, used, self._part)
        with self._speaking, self._world.waiting_apart():
            self._stop_at = self._ask(place, push)
        self._take(place)
        self.since += 1

    def _ask(self, place: int, push: Push | None) -> int:
        """Send to all servers, then take what each answers; None only asks for the weights."""
        ways = self._ways[place]
        kind = PULL if push is None else PUSH if push.used else TICK
        words = self._words(kind, place)
        if push is not None:
            head = [push.wants_to_stop, push.clock, push.weight, push.part]
            told = [*head, *push.rates, *push.used]
            words[2 : 2 + len(told)] = torch.tensor([*map(float, told)], dtype=torch.float64)
        stop_at = 0
        for server, link in self._links.items():
            with self._named(server):
                link.send(words, ways[server].up if kind == PUSH else None)
        if self._server is not None:
            rank = self._world.rank
            own = ways[rank]
            if push is None:
                self._server.pull(rank, place, own.down)
            else:
                result = self._server.push(rank, push, own.up, own.down)
                stop_at = result if rank == 0 else stop_at
        for server, link in self._links.items():
            with self._named(server):
                [found_at] = link.words(1)
                link.data(ways[server].down)
            stop_at = int(found_at) if server == 0 else stop_at
        return stop_at

    def _named(self, server: int) -> AbstractContextManager[None]:
        return answering(f"rank {server}, a parameter server,")

    def _words(self, kind: int, place: int = 0) -> torch.Tensor:
        words = torch.zeros(self._length, dtype=torch.float64)
        words[0], words[1] = kind, place
        return words

    def _take(self, place: int) -> None:
        own = [numbers_of(p) for p in self._layouts[place].parameters]
        for way in self._ways[place].values():
            way.take(own)

    def after_step(self) -> bool:
        """A step was made; returns whether this is the one after which all stop."""
        return self._before_section is None and 0 < self._stop_at <= self._steps

    # -- parts of an epoch that come to who asks ----------------------------------------------

    def open_section(self, steps: int) -> None:
        """Parts of so many steps may be claimed, numbered from 0; all ranks call it."""
        if not self._is_serving:
            self._serve()
        self._before_section = self._steps
        may_end = self._may_end()  # and those that wait to come back
        self._tell_servers("begin", self._met, self._steps)
        self._tell_servers("open", steps, may_end)
        dropped.may_end(may_end)
        self._world.wait("parts of an epoch")

    def claim(self) -> tuple[int, int]:
        """The number of the next part, and how many are left; -1 and the end where none is.

        Raises:
            LostRank: the first server has ended.
        """
        if self._first is not None:
            return self._first.handing.claim(0)
        link = self._links[0]
        with self._speaking, self._named(0):
            link.send(self._words(CLAIM))
            number, left = link.words(2)
        return int(number), int(left)

    def used(self, number: int) -> None:
        """The next step is of this part."""
        assert self._before_section is not None
        self._part = number
        self._steps = max(self._steps, self._before_section + number // self.parts + 1)

    def dropped(self) -> list[int]:
        """Ranks that were killed and without which the others go on, as the first one knows."""
        if not (self._hooks and self._world.is_first):
            return []
        here = {self._ids[item] for item in self._of_first_server("living")}
        return sorted({*range(self._world.place.world_size)} - here)

    def close_section(self) -> None:
        """End the section with the step of which parts were claimed."""
        if self._first is not None:
            self._first.handing.close()
            return
        with self._speaking, self._named(0):
            self._links[0].send(self._words(CLOSE))

    def _rest(self) -> list[int]:
        for server, link in self._links.items():
            with self._speaking, self._named(server):
                link.send(self._words(MEET if server == 0 else REST))
                if server:
                    link.words(1)
        if self._first is not None:
            met = self._first.rest(0, self._world.timeout_s)
        else:
            if self._server is not None:
                self._server.leave(self._world.rank)
            with self._speaking, self._named(0):
                there = self._links[0].words(self.parts)
            met = [item for item, is_there in enumerate(there) if is_there]
        if not met:
            raise RuntimeError("not all workers have come to the end of their steps")
        return met

    def _go_on_with(self, met: list[int]) -> None:
        lost = [self._ids[item] for item in self._met if item not in met]
        for link in self._links.values():
            link.send(self._words(END))
        self._end_threads()
        self._links.clear()
        self._ends.clear()
        self._met = met
        self._world.go_on_with([self._ids[item] for item in met])
        self._find()
        self._begin_without(lost)
        self._answer_all()

    def _begin_without(self, lost: list[int]) -> None:
        self._tell_servers("begin", self._met, self._steps)
        if self._world.is_first:
            self._say(dropped_words(lost, self._of_first_server("untaken"), self.parts))

    def _may_end(self) -> list[int]:
        return [*self._ids[self._servers :]]

    def _end_threads(self) -> None:
        if self._answers is not None:
            self._answers.join(_END_S)

    @torch.no_grad()
    def meet(self) -> bool:
        """Make all ranks alike; returns whether one wants to stop. All of them call it."""
        if self._is_serving:
            waiting = self._world.begun(None, "end of the workers' steps")
            with self._world.within(waiting):
                met = self._rest()
            if len(met) < len(self._met):
                self._go_on_with(met)
        self._part = -1
        result = self._world.gather(
            [self._vote, self.since, self._steps], "end of the workers' steps"
        )
        votes, since, _ = map(sum, zip(*result, strict=True))
        self._vote = 0.0
        self._steps, self._before_section = max(steps for *_, steps in result), None
        if self._is_serving and since:
            own, self.since = self.since, 0
            # All have sent their last gradient, and none sends the next one before all have read.
            for place in range(len(self._layouts)):
                self._ask(place, None)
                self._take(place)
            self._mean_of_buffers(own / since)
            self._tell_servers("begin", self._met, self._steps)
            self._world.wait("weights from the servers")
        return bool(votes)

    def _mean_of_buffers(self, share: float) -> None:
        # Counts too, such as of the batches that BatchNorm has seen.
        buffers = [
            b
            for b in self._model.buffers()
            if b.numel() and (b.is_floating_point() or (b.dim() == 0 and not b.is_complex()))
        ]
        if not buffers:
            return
        flat = torch.cat([b.detach().reshape(-1).double() for b in buffers]) * share
        self._world.sum(flat, "mean of the ranks' statistics")
        parts = torch.split(flat, [b.numel() for b in buffers])
        for buffer, values in zip(buffers, parts, strict=True):
            exact = values if buffer.is_floating_point() else values.round()
            buffer.copy_(exact.view(buffer.shape))

    # -- whole again -------------------------------------------------------------------------

    def staleness(self) -> list[Counter[int]] | None:
        """Of each worker, how many of its gradients were how many steps old; all ranks call it."""
        if self._spare:
            return None
        own = self._of_first_server("stale") if self._world.is_first else None
        result = self._world.from_first(own, "staleness")
        return [Counter(dict(item)) for item in result]

    def late(self) -> list[int] | None:
        """Of each rank, how many gradients came too late; None where none can; all call it."""
        if not self._spare:
            return None
        own = self._of_first_server("late") if self._world.is_first else None
        result: list[int] = self._world.from_first(own, "gradients that came late")
        return result

    def _say_times(self) -> None:
        if words := times_words(self._update_ms()):
            self._say(words)

    def state_of(self, optimizer: torch.optim.Optimizer, *, kept: bool) -> dict[str, Any]:
        """An optimizer's state, from the servers; all ranks call it."""
        place = place_of(optimizer, self._optimizers)
        own: dict[int, dict[str, Any]] = {}
        if self._server is not None:
            with self._server.at_rest():
                own = self._server.shares[place].states()
        whole = gathered_states(self._world, self._layouts[place], own, self._servers)
        return {**optimizer.state_dict(), "state": whole}

    def part_of(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Of an optimizer's whole state what this rank loads: its server takes the share."""
        if self._server is not None:
            place = place_of(optimizer, self._optimizers)
            own = self._layouts[place].states(self._world.rank, state["state"])
            self._server.shares[place].take_states(own)
        return {**state, "state": {}}

    def close(self, error: BaseException | None = None) -> None:
        """Let the optimizers step by themselves again, from the servers' states.

        After an error the servers may be gone: then the states are lost.
        """
        if not self._hooks:
            return
        dropped.may_end(())
        while self._hooks:
            self._hooks.pop().remove()
        if error is None:
            self._say_times()
            for optimizer, layout in zip(self._optimizers, self._layouts, strict=True):
                states = self.state_of(optimizer, kept=True)["state"]
                for number, state in states.items():
                    whole = layout.parameters[number]
                    optimizer.state[whole] = state_beside(optimizer, whole, state)
        if self._is_serving:
            words = self._words(END)
            for link in self._links.values():
                with suppress(RuntimeError):  # that server has ended, or waits for another worker
                    link.send_last(words, _END_S)
        if self._server is not None:
            self._server.leave(self._world.rank)
            if error is not None:
                self._server.lose()
        self._end_threads()
        self._is_serving, self.since = False, 0


def dropped_words(lost: Sequence[int], untaken: int, parts: int) -> str:
    """What the user should know of workers that were killed."""
    who = "rank" if len(lost) == 1 else "ranks"
    words = f"{who} {', '.join(map(str, lost))} killed: the others go on"
    if not untaken:
        return f"{words}, and have taken its parts of batches"
    return f"{words}; {counted(untaken, 'part')} of {parts} of a batch not taken this time"
