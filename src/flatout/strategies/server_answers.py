"""How a server that does not wait answers its workers: in a thread for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import torch

from flatout.strategies.server import Push, Server
from flatout.strategies.server_link import (
    CALL,
    CLAIM,
    CLOSE,
    END,
    MEET,
    PULL,
    PUSH,
    REST,
    Link,
)
from flatout.strategies.server_spare import SpareServer
from flatout.world import dropped, tell_parts

HEAD = 6
"""Words of a message before rates and what is used: what is wanted, the optimizer, the vote, to
which step the worker has come, the weight of its samples, and the part of an epoch they are of."""

# How long it may take until a worker's agent knows that it was killed.
_NOTICED_S = 20.0
# How long a worker may send nothing, as while all evaluate; its end is noticed at once.
_BETWEEN_S = 30 * 24 * 3600.0


class Answers:
    """Answers workers."""

    def __init__(
        self,
        server: Server,
        words: int,
        groups: Sequence[int],
        ids: Sequence[int],
        timeout_s: float,
    ) -> None:
        self._server, self._words, self._groups = server, words, groups
        self._ids, self._timeout_s = ids, timeout_s
        self._links: Mapping[int, Link] = {}
        self._threads: list[Thread] = []

    def start(self, links: Mapping[int, Link]) -> None:
        """Answer workers from here on, by their numbers."""
        self._links = links
        for worker, link in links.items():
            # Daemons: where a rank fails it must be able to end while others are waited for.
            thread = Thread(target=self._answer, args=(worker, link), daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, patience_s: float | None = None) -> None:
        """Wait until the workers have ended, each for so long."""
        for thread in self._threads:
            thread.join(patience_s)
        self._threads.clear()

    def _answer(self, worker: int, link: Link) -> None:
        torch.set_num_threads(1)  # a rank's own step has the cores
        result: list[float] = []
        with suppress(RuntimeError):  # it has ended: its rank, or the launcher, says so
            while (result := link.words(self._words, _BETWEEN_S))[0] != END:
                self._answer_one(worker, link, result)
        self._server.leave(worker)
        if result[:1] != [END] and dropped.is_dropped(self._ids[worker], _NOTICED_S):
            self._server.drop(worker)
        else:
            self._server.lose()

    def _answer_one(self, worker: int, link: Link, told: Sequence[float]) -> None:
        server, kind, place = self._server, int(told[0]), int(told[1])
        if kind == CLOSE:
            server.handing.close()
            return
        if kind == CALL:
            name, *arguments = link.pair.hear()
            link.pair.tell(self.called(name, *arguments))
            return
        if kind == CLAIM:
            link.send(torch.tensor(server.handing.claim(worker), dtype=torch.float64))
            return
        if kind == MEET:
            met, parts = server.rest(worker, self._timeout_s), range(server.handing.parts)
            link.send(torch.tensor([float(item in met) for item in parts]).double())
            return
        length, stop_at = len(server.shares[place].values), 0
        up, down = link.up[:length], link.down[:length]
        if kind == REST:
            server.leave(worker)
            down = down[:0]
        elif kind == PULL:
            server.pull(worker, place, down)
        else:
            if kind == PUSH:
                link.data(up)
            stop_at = server.push(worker, self._push_of(kind, told), up, down)
        link.send(torch.tensor([float(stop_at)], dtype=torch.float64), down)

    def _push_of(self, kind: int, told: Sequence[float]) -> Push:
        place = int(told[1])
        rates = 2 * self._groups[place]
        used = told[HEAD + rates :][: self._server.shares[place].parameters]
        is_push = kind == PUSH
        return Push(
            place,
            int(told[3]),
            told[4],
            bool(told[2]),
            list(told[HEAD:][:rates]),
            [bool(item) for item in used] if is_push else [],
            int(told[5]),
        )

    def called(self, name: str, *arguments: Any) -> Any:
        """What the first rank asks of a server: plain data and tensors."""
        server = self._server
        if name == "weights":
            place, values = arguments
            server.shares[place].values.copy_(values)
        elif name == "begin":
            server.begin(*arguments)
        elif name == "open":
            steps, may_end = arguments
            server.handing.open(steps)
            dropped.may_end(may_end)
        elif name == "take_states":
            place, states = arguments
            with server.at_rest():
                server.shares[place].take_states(states)
        elif name == "states":
            place, workers = arguments
            with server.at_rest():
                states = list(server.shares[place].states().items())
            tell_parts([self._links[worker].pair for worker in workers], states)
        elif name == "update_ms":
            return sum(share.update_ms() for share in server.shares)
        elif name == "living":
            return server.living()
        elif name == "untaken":
            return server.handing.untaken()
        elif name == "stale":
            return [[[*pair] for pair in item.items()] for item in server.stale]
        elif name == "late":
            return server.late if isinstance(server, SpareServer) else []
        return None
