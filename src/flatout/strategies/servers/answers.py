"""Answers of a server to its workers: it waits for all of them, or has a thread for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import accumulate
from threading import Thread
from typing import Any

import torch

from flatout.strategies.servers.backup_workers import SpareServer
from flatout.strategies.servers.layout import chunks_of
from flatout.strategies.servers.link import (
    CALL,
    CLAIM,
    CLOSE,
    END,
    GRADIENTS,
    HEAD,
    MEET,
    PULL,
    PUSH,
    REST,
    STEP,
    Link,
)
from flatout.strategies.servers.server import Server
from flatout.strategies.servers.share import Push, Share
from flatout.world import dropped, send_parts

# Maximum seconds until a worker's agent notices that the worker was killed.
_NOTICED_S = 20.0
# Maximum seconds in which a worker may send nothing, as during an evaluation. Its end is noticed at
# once.
_BETWEEN_S = 30 * 24 * 3600.0
# Number of chunks of gradients that are received ahead.
_AHEAD = 2


class Answers:
    """Answers to the requests that both kinds of servers get.

    The first rank calls methods whose names begin with `call_`, with plain data and tensors.
    """

    def __init__(
        self, links: Sequence[Link], shares: Sequence[Share], session: Mapping[str, Any]
    ) -> None:
        self._links, self._shares, self._session = links, shares, session
        self._groups = [len(own["groups"]) for own in session["optimizers"]]
        lengths = [len(share.values) for share in shares]
        ends = accumulate(lengths)
        self._places = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]

    def _answer_call(self, link: Link) -> None:
        name, *arguments = link.pair.receive_value()
        link.pair.send_value(getattr(self, f"call_{name}")(*arguments))

    def _at_rest(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _rates_and_used(self, place: int, words: Sequence[float]) -> tuple[list[float], list[bool]]:
        rates = HEAD + 2 * self._groups[place]
        used = words[rates : rates + self._shares[place].parameters]
        return list(words[HEAD:rates]), [bool(item) for item in used]

    def call_weights(self, place: int, values: torch.Tensor) -> None:
        self._shares[place].values.copy_(values)

    def call_take_states(self, place: int, states: list[Any]) -> None:
        with self._at_rest():
            self._shares[place].take_states(dict(states))

    def call_states(self, place: int, workers: list[int]) -> None:
        with self._at_rest():
            states = list(self._shares[place].states().items())
        send_parts([self._links[worker].pair for worker in workers], states)

    def call_update_ms(self) -> float:
        """Return the time of an update, in ms."""
        return sum(share.update_ms() for share in self._shares)


class SynchronousAnswers(Answers):
    """Answers of a server that steps once it has the gradients of all workers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums = [torch.zeros_like(share.values) for share in self._shares]
        self._chunks = [chunks_of(len(sums)) for sums in self._sums]

    @torch.no_grad()
    def run(self) -> None:
        first = self._links[0]
        while (words := first.words(patience_s=_BETWEEN_S))[0] != END:
            kind, place, factor = int(words[0]), int(words[1]), words[2]
            if kind == CALL:
                self._answer_call(first)
                continue
            if kind == STEP:
                self._step(place, factor, words)
                continue
            for link in self._links[1:]:
                if link.words()[:2] != [kind, place]:
                    raise RuntimeError("ranks are not at the same step")
            if kind == GRADIENTS:
                self._measure(place, factor)
            else:
                self._whole_step(place, factor, words)

    def _add_up(self, place: int, factor: float) -> Iterator[slice]:
        """Sum the gradients of all ranks, chunk by chunk, in the order of the ranks."""
        sums, chunks = self._sums[place], self._chunks[place]
        coming: deque[list[tuple[torch.Tensor, Any]]] = deque()
        for at, chunk in enumerate(chunks):
            while len(coming) < _AHEAD and at + len(coming) < len(chunks):
                coming.append(self._begin(place, chunks[at + len(coming)]))
            into = sums[chunk]
            for rank, (gradient, work) in enumerate(coming.popleft()):
                if work is not None:
                    work.wait()
                if rank == 0:
                    into.copy_(gradient)
                else:
                    into.add_(gradient)
            if factor != 1.0:
                into.mul_(factor)
            yield chunk

    def _begin(self, place: int, chunk: slice) -> list[tuple[torch.Tensor, Any]]:
        result: list[tuple[torch.Tensor, Any]] = []
        for link in self._links:
            if link.is_shared:
                result.append((link.up[self._places[place]][chunk], None))
            else:
                gradient = torch.empty_like(self._sums[place][chunk])
                result.append((gradient, link.pair.receive(gradient)))
        return result

    def _measure(self, place: int, factor: float) -> None:
        """Sum gradients, and send whether they are finite, and the square of their norm."""
        for _ in self._add_up(place, factor):
            pass
        sums = self._sums[place]
        square = torch.linalg.vector_norm(sums).double().square()
        answer = torch.stack([(~torch.isfinite(sums).all()).double(), square])
        for link in self._links:
            link.send(answer)

    def _step(self, place: int, factor: float, words: Sequence[float]) -> None:
        sums, share = self._sums[place], self._shares[place]
        if factor != 1.0:
            sums.mul_(factor)
        for own, piece in share.pieces(*self._rates_and_used(place, words)):
            share.step_piece(piece, self._clipped(sums[own]))
        works: list[Any] = []
        for chunk in self._chunks[place]:
            works += self._send(place, chunk)
        self._finish(works)

    def _whole_step(self, place: int, factor: float, words: Sequence[float]) -> None:
        """Step each piece once its gradients are there, and send its weights back at once."""
        sums, share = self._sums[place], self._shares[place]
        pieces = deque(share.pieces(*self._rates_and_used(place, words)))
        waiting = deque(self._chunks[place])
        works: list[Any] = []
        for chunk in self._add_up(place, factor):
            while pieces and pieces[0][0].stop <= chunk.stop:
                own, piece = pieces.popleft()
                share.step_piece(piece, self._clipped(sums[own]))
            ready = min(pieces[0][0].start, chunk.stop) if pieces else chunk.stop
            while waiting and waiting[0].stop <= ready:
                works += self._send(place, waiting.popleft())
        self._finish(works)

    def _clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        limit = self._session["clip_value"]
        return gradient if limit is None else gradient.clamp_(-limit, limit)

    def _send(self, place: int, chunk: slice) -> list[Any]:
        weights, result = self._shares[place].values[chunk], []
        for link in self._links:
            if link.is_shared:
                link.down[self._places[place]][chunk].copy_(weights)
            else:
                result.append(link.pair.send(weights))
        return result

    def _finish(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()
        for link in self._links:
            if link.is_shared:
                link.send(torch.zeros(1, dtype=torch.float64))


class AsynchronousAnswers(Answers):
    """Answers of a server that steps with each gradient, in a thread for each worker."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ids, self._timeout_s = self._session["ids"], self._session["timeout_s"]
        spare, bound = self._session["spare"], self._session["staleness"]
        makes, own = (SpareServer, spare) if spare else (Server, bound)
        self._server = makes(self._shares, len(self._links), own, self._timeout_s)

    def run(self) -> None:
        dropped.come_to(self._session["times"])
        # Daemon threads, because a failed rank must be able to end while threads wait for other
        # ranks.
        threads = [
            Thread(target=self._answer, args=(worker, link), daemon=True)
            for worker, link in enumerate(self._links)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dropped.may_end(())

    def _at_rest(self) -> AbstractContextManager[None]:
        return self._server.at_rest()

    def _answer(self, worker: int, link: Link) -> None:
        torch.set_num_threads(1)  # a rank's own step needs the cores
        words: list[float] = []
        with suppress(RuntimeError):  # the worker has ended; its rank or the launcher reports why
            while (words := link.words(patience_s=_BETWEEN_S))[0] != END:
                self._answer_one(worker, link, words)
        self._server.leave(worker)
        if words[:1] != [END] and dropped.is_dropped(self._ids[worker], _NOTICED_S):
            self._server.drop(worker)
        else:
            self._server.lose()

    def _answer_one(self, worker: int, link: Link, words: Sequence[float]) -> None:
        server, kind, place = self._server, int(words[0]), int(words[1])
        if kind == CLOSE:
            server.epoch.close()
            return
        if kind == CALL:
            self._answer_call(link)
            return
        if kind == CLAIM:
            link.send(torch.tensor(server.epoch.claim(worker), dtype=torch.float64))
            return
        if kind == MEET:
            met, parts = server.rest(worker, self._timeout_s), range(server.epoch.parts)
            link.send(torch.tensor([float(item in met) for item in parts]).double())
            return
        up, down = link.up[self._places[place]], link.down[self._places[place]]
        stop_at = 0
        if kind == REST:
            server.leave(worker)
            down = down[:0]
        elif kind == PULL:
            server.pull(worker, place, down)
        else:
            if kind == PUSH:
                link.data(up)
            stop_at = server.push(worker, self._push_of(kind, words), up, down)
        link.send(torch.tensor([float(stop_at)], dtype=torch.float64), down)

    def _push_of(self, kind: int, words: Sequence[float]) -> Push:
        place, (stop, clock, weight, part) = int(words[1]), words[2:HEAD]
        rates, used = self._rates_and_used(place, words)
        return Push(
            place, int(clock), weight, bool(stop), rates, used if kind == PUSH else [], int(part)
        )

    def call_begin(self, workers: list[int], clock: int) -> None:
        self._server.begin(workers, clock)

    def call_open(self, steps: int, may_end: list[int]) -> None:
        """Assign the parts of an epoch; these ranks may be killed from now on."""
        self._server.epoch.open(steps)
        dropped.may_end(may_end)

    def call_living(self) -> list[int]:
        return self._server.living()

    def call_untaken(self) -> int:
        """Return the number of parts of killed workers that no other worker has taken."""
        return self._server.epoch.untaken()

    def call_stale(self) -> list[Any]:
        return [[[*pair] for pair in item.items()] for item in self._server.stale]

    def call_late(self) -> list[int]:
        return self._server.late if isinstance(self._server, SpareServer) else []
