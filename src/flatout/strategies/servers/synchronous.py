"""Parameter servers that wait for the gradients of all ranks.

The gradients are those of loss sums, as in ddp.py, and their divisor is sent with them, so the
result is that of one rank. Each server sums its gradients alone, in the order of the ranks, so that
a rank's link carries the gradients once and the weights once. If servers have hosts of their own,
one of the ranks of a host sends for all (`host_leader.py`).

If a step does not depend on all gradients together, a server sends the first weights back while the
last gradients still arrive. Two things prevent this: clipping by norm, and gradients so large that
their sum might be infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatout.strategies.elementwise import check_laid_out
from flatout.strategies.replicas import check_replicas
from flatout.strategies.servers.host_leader import tower_of
from flatout.strategies.servers.layout import chunks_of
from flatout.strategies.servers.link import GRADIENTS, STEP, WHOLE_STEP
from flatout.strategies.servers.parameter_server import ParameterServer
from flatout.strategies.strategy import Sums, Tensors

# Positions after the sums in the numbers that ranks sum. _TOO_LARGE: number of ranks whose
# gradients are too large. _USED: begin of the number of ranks that have used each parameter.
_TOO_LARGE, _USED = 3, 4
# Factor below infinity that gradients must stay, and the largest factor by which they are scaled.
_ROOM = 1e6


class SynchronousServers(ParameterServer):
    """Sends this rank's gradients to the servers and takes the weights that they send back.

    Args:
        clip: largest norm of all gradients, and largest element, or None.

    Raises:
        WorldError: the ranks' models differ.
    """

    def __init__(self, *given: Any, clip: tuple[float | None, float | None]) -> None:
        super().__init__(*given)
        check_replicas(self._model, self._world, "at the start")
        self._clip_norm, self._clip_value = clip
        self.across = self._measured_by_servers
        self._known: set[torch.Tensor] = set()
        self._seen: Tensors = ()
        self._turn: list[int] = []
        self._samples = self._factor = 1.0
        self._is_whole = self._is_bad = False
        self._answers: list[torch.Tensor] = []
        self._used: dict[int, list[bool]] = {}
        self._versions: list[int] = []

    def begin(self) -> None:
        """Find the servers, and distribute the weights."""
        apart = self._apart
        if apart is not None and not apart.are_here and self._world.size > self._world.place.nodes:
            self._speakers, self._tower = tower_of(self._world)
        super().begin()
        self._known = {p for layout in self._layouts for p in layout.parameters}

    def _policy(self) -> dict[str, Any]:
        return {"waits": True, "clip_value": self._clip_value}

    # -- around a step -----------------------------------------------------------------------

    def before_step(self, turn: int, parameters: Tensors) -> None:
        """Begin a step, and give changed weights to the servers.

        Raises:
            ModelError: an optimizer got parameters since `begin`.
        """
        if parameters is not self._seen:
            check_laid_out("world.strategy=parameter_server", parameters, self._known)
        self._seen = parameters
        self._turn = [place for place in range(len(self._layouts)) if turn >> place & 1]
        # Other weights may have been loaded, on all ranks.
        if self._world.is_first and self._versions != self._versions_now():
            self._send_weights()

    def _versions_now(self) -> list[int]:
        return [p._version for layout in self._layouts for p in layout.parameters]

    def arm(self, own: Sums, samples: float, scaler: torch.amp.GradScaler | None = None) -> None:
        """Note that the next backward completes the gradients."""
        super().arm(own, samples, scaler)
        self._samples = samples

    @torch.no_grad()
    def finish(self) -> Sums:
        """Sum the losses, and send the servers gradients that they must measure now."""
        trained = [p for place in self._turn for p in self._layouts[place].parameters]
        numbers = torch.zeros(_USED + len(trained), dtype=torch.float64)
        for at, number in enumerate(self._own):
            numbers[at] = float(number)
        used = [float(p.grad is not None) for p in trained]
        numbers[_USED:] = torch.tensor(used, dtype=numbers.dtype)
        for place in self._turn:
            self._put_gradients(place)
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
            self._tower.add_up([route.up for place in self._turn for route in self._routes[place]])
        if not self._is_whole:
            self._exchange([(place, GRADIENTS) for place in self._turn], "gradients")
        device = trained[0].device
        return Sums(total.to(device), weight.to(device), votes)

    def _are_small(self) -> bool:
        routes = [route for place in self._turn for route in self._routes[place] if len(route.up)]
        most = torch.finfo(routes[0].up.dtype).max / _ROOM / self._world.size
        return all(float(torch.linalg.vector_norm(route.up, torch.inf)) <= most for route in routes)

    def _measured_by_servers(self, numbers: torch.Tensor) -> None:
        """Add the servers' results: whether gradients are finite, and their squared norm."""
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
        kind = WHOLE_STEP if self._is_whole else STEP
        more = [*self._rates(optimizer), *map(float, self._used[place])]
        self._exchange([(place, kind)], "weights of the servers", more)
        if self._tower is not None:
            downs = [route.down for route in self._routes[place]]
            self._tower.share(downs, "weights of the servers")
        self._take_weights(place)
        self._versions = self._versions_now()

    def _exchange(self, what: list[tuple[int, int]], why: str, more: Sequence[float] = ()) -> None:
        """Send messages, with the gradients that belong to them, and take the answers."""
        with self._world.within(self._world.begun(None, why)):
            works: list[tuple[int, Any]] = []
            for place, kind in what:
                for server, link in enumerate(self._links):
                    message = link.message(kind, place, [self._factor], *more)
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
        each = [chunks_of(len(route.up)) for route in self._routes[place]]
        for turn in range(max(map(len, each))):
            for server, (link, route) in enumerate(
                zip(self._links, self._routes[place], strict=True)
            ):
                if link.is_shared or turn >= len(each[server]):
                    continue
                chunk = each[server][turn]
                with self._answering(server):
                    if kind != STEP:
                        result.append((server, link.pair.send(route.up[chunk])))
                    if kind != GRADIENTS:
                        result.append((server, link.pair.receive(route.down[chunk])))
        return result

    def _answers_begun(self) -> list[tuple[int, Any]]:
        result: list[tuple[int, Any]] = []
        for server, link in enumerate(self._links):
            self._answers.append(torch.zeros(2, dtype=torch.float64))
            with self._answering(server):
                result.append((server, link.pair.receive(self._answers[-1])))
        return result
