"""Parameter servers that do not wait: each gradient of a worker is a step as soon as it arrives.

Dean et al., "Large Scale Distributed Deep Networks", 2012. Each rank is a worker that computes its
part of each batch, and sends the gradient of its mean loss to the servers. It continues with the
weights of their answer, which contain all workers' steps up to then. The staleness of a gradient is
the number of steps that other workers made since its weights were read. All ranks become equal when
they meet: at the end of an epoch, and before evaluating and saving.

Between two meetings the first server assigns parts of batches to the workers that ask for them, so
that a slow worker takes fewer. If the source of the batches does not allow this, each worker has
its own part of each batch.

A worker clips its own gradient, and does not send a gradient with a NaN.

A worker that is killed between meetings is dropped. Other workers get the parts that it had
claimed, and the remaining ranks continue without it after the meeting.

With n spare workers, servers do not wait for n of the gradients of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from flatout.strategies.servers.link import CLAIM, CLOSE, MEET, PULL, PUSH, REST, TICK
from flatout.strategies.servers.parameter_server import ParameterServer
from flatout.strategies.servers.refusals import check_spare
from flatout.strategies.strategy import Sums, Tensors
from flatout.words import counted
from flatout.world import dropped


class AsynchronousServers(ParameterServer):
    """Sends this rank's gradients to the servers and continues with the weights of their answer.

    Args:
        staleness: maximum number of steps that a worker may be ahead of the slowest worker; None
            sets no bound.
        spare: number of workers for which no step waits; 0 if each gradient is a step of its own.

    Attributes:
        since: steps since the ranks have met.
        parts: number of parts of a batch, equal to the number of ranks at the start.

    Raises:
        WorldError: there are several servers with spare workers, or all ranks are spare.
    """

    steps_apart = True

    def __init__(self, *given: Any, staleness: int | None, spare: int) -> None:
        super().__init__(*given)
        world = self._world
        check_spare(spare, self._count, world.size)
        self._staleness, self._spare = staleness, spare
        self._is_on_cpu = all(parameter.is_cpu for parameter in self._model.parameters())
        self._is_serving = False
        self._vote = 0.0
        self._steps, self._stop_at = 0, 0
        self.since = 0
        self.parts, self._part = world.size, -1
        # Servers know the ranks by these numbers even after some ranks have ended.
        self._ids, self._met = world.ids, list(range(world.size))
        # steps at the begin of the section, while parts are assigned
        self._before_section: int | None = None

    def _policy(self) -> dict[str, Any]:
        return {
            "waits": False,
            "ids": [*self._ids],
            "times": dropped.times(),
            "staleness": self._staleness,
            "spare": self._spare,
        }

    def _workers(self) -> list[int]:
        return self._met

    def _serve(self) -> None:
        self._is_serving = True
        self._send_weights()
        self._world.wait("all servers are there")

    # -- around a step -----------------------------------------------------------------------

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """Begin a step, before anything changes."""
        if not self._is_serving:
            self._serve()

    def finish(self) -> Sums:
        """Return this rank's own sums, because it steps independently."""
        self._vote = float(self._own.votes)
        if not self._own.weight:  # no sample of this rank counts
            for layout in self._layouts:
                for parameter in layout.parameters:
                    parameter.grad = None
        return self._own._replace(votes=0.0)

    @torch.no_grad()
    def _step(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        used = self._put_gradients(place)
        # On a GPU, nothing has waited for the check yet.
        ups = [] if self._is_on_cpu else [route.up for route in self._routes[place]]
        if not all(bool(torch.isfinite(up).all()) for up in ups):
            used = []
        is_apart = self._before_section is None
        self._steps += is_apart
        # While parts are assigned, a rank that wants to stop closes the section instead.
        vote = float(bool(self._vote) and is_apart)
        numbers = [vote, self._steps, float(self._own.weight), self._part]
        kind = PUSH if any(used) else TICK
        more = [*self._rates(optimizer), *map(float, used if kind == PUSH else ())]
        with self._speaking, self._world.waiting_apart():
            self._stop_at = self._ask(place, kind, numbers, more)
        self._take_weights(place)
        self.since += 1

    def _ask(self, place: int, kind: int, numbers: list[float], more: Sequence[float] = ()) -> int:
        """Send a request to all servers, take their weights, and return the common last step."""
        for server, link in enumerate(self._links):
            up = self._routes[place][server].up if kind == PUSH else None
            with self._answering(server):
                link.send(link.message(kind, place, numbers, *more), up)
        stop_at = 0
        for server, link in enumerate(self._links):
            with self._answering(server):
                [found_at] = link.words(1)
                link.data(self._routes[place][server].down)
            stop_at = int(found_at) if server == 0 else stop_at
        return stop_at

    def after_step(self) -> bool:
        """Return whether all ranks stop after this step."""
        return self._before_section is None and 0 < self._stop_at <= self._steps

    # -- parts of an epoch that ranks claim ------------------------------------------------------

    def open_section(self, steps: int) -> None:
        """Allow claims of the parts of `steps` steps, numbered from 0. All ranks call this."""
        if not self._is_serving:
            self._serve()
        self._before_section = self._steps
        # This includes ranks that wait to come back. Without the first rank or a server, none
        # continues.
        may_end = [*self._ids[1 if self._apart is not None else self._count :]]
        self._call_all("begin", self._met, self._steps)
        self._call_all("open", steps, may_end)
        dropped.may_end(may_end)
        self._world.wait("parts of an epoch")

    def claim(self) -> tuple[int, int]:
        """Return the number of the next part and the count of parts left, or -1 and the end.

        Raises:
            LostRank: the first server has ended.
        """
        link = self._links[0]
        with self._speaking, self._answering(0):
            link.send(link.message(CLAIM))
            number, left = link.words(2)
        return int(number), int(left)

    def used(self, number: int) -> None:
        """Set the part of the next step."""
        assert self._before_section is not None
        self._part = number
        self._steps = max(self._steps, self._before_section + number // self.parts + 1)

    def dropped(self) -> list[int]:
        """Return the ranks that were killed and dropped, as the first rank knows them."""
        if not (self._hooks and self._world.is_first):
            return []
        here = {self._ids[item] for item in self._call(0, "living")}
        return sorted({*range(self._world.place.world_size)} - here)

    def close_section(self) -> None:
        """End the section after the last step of which a part was claimed."""
        with self._speaking, self._answering(0):
            self._links[0].send(self._links[0].message(CLOSE))

    def _rest(self) -> list[int]:
        for server, link in enumerate(self._links):
            with self._speaking, self._answering(server):
                link.send(link.message(MEET if server == 0 else REST))
                if server:
                    link.words(1)
        with self._speaking, self._answering(0):
            there = self._links[0].words(self.parts)
        met = [item for item, is_there in enumerate(there) if is_there]
        if not met:
            raise RuntimeError("not all workers have come to the end of their steps")
        return met

    def _go_on_with(self, met: list[int]) -> None:
        lost = [self._ids[item] for item in self._met if item not in met]
        self._met = met
        self._world.go_on_with([self._ids[item] for item in met])
        self._speakers = range(self._world.size)
        self._call_all("begin", self._met, self._steps)
        if self._world.is_first:
            self._say(dropped_words(lost, self._call(0, "untaken"), self.parts))

    @torch.no_grad()
    def meet(self) -> bool:
        """Make all ranks equal, and return whether one wants to stop. All ranks call this."""
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
            # All ranks have sent their last gradient, and none sends the next before all ranks have
            # read.
            for place in range(len(self._layouts)):
                self._ask(place, PULL, [])
                self._take_weights(place)
            self._mean_of_buffers(own / since)
            self._call_all("begin", self._met, self._steps)
            self._world.wait("weights from the servers")
        return bool(votes)

    def _mean_of_buffers(self, share: float) -> None:
        # This includes counts, such as of the batches that BatchNorm has processed.
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
        """Return each worker's numbers of gradients by age, in steps; all ranks call it."""
        if self._spare:
            return None
        result = self._world.from_first(self._of_first_server("stale"), "staleness")
        return [Counter(dict(item)) for item in result]

    def late(self) -> list[int] | None:
        """Return for each rank the number of its late gradients, or None if none can be late.

        All ranks call this.
        """
        if not self._spare:
            return None
        own = self._of_first_server("late")
        result: list[int] = self._world.from_first(own, "gradients that came late")
        return result

    def _of_first_server(self, name: str) -> Any:
        return self._call(0, name) if self._world.is_first else None

    def close(self, error: BaseException | None = None) -> None:
        """Let the optimizers step by themselves again, from the servers' states.

        After an error the servers may be gone: then the states are lost.
        """
        if self._hooks:
            dropped.may_end(())
        super().close(error)
        self._is_serving, self.since = False, 0


def dropped_words(lost: Sequence[int], untaken: int, parts: int) -> str:
    who = "rank" if len(lost) == 1 else "ranks"
    words = f"{who} {', '.join(map(str, lost))} killed: the others go on"
    if not untaken:
        return f"{words}, and have taken its parts of batches"
    return f"{words}; {counted(untaken, 'part')} of {parts} of a batch not taken this time"
