"""The process of a parameter server that computes nothing.

It knows neither the script nor the model: the first rank tells it the optimizer, and how many
numbers of each parameter it has (`server_session.py`). It serves one fit after the other, until the
script has ended.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from flatout.console import say
from flatout.errors import WorldError
from flatout.processes import not_ignored
from flatout.strategies.fsdp_refusals import ELEMENTWISE
from flatout.strategies.server import Server, Share
from flatout.strategies.server_answers import Answers
from flatout.strategies.server_layout import chunk_of, chunks_of
from flatout.strategies.server_link import (
    END,
    GRADIENTS,
    STATES,
    STEP,
    TAKE,
    TIMES,
    VALUES,
    Link,
)
from flatout.strategies.server_spare import SpareServer
from flatout.world import (
    POLITE_S,
    LostRank,
    dropped,
    place,
    servers,
    tell_parts,
)

_KINDS = {kind.__name__: kind for kind in ELEMENTWISE}
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK_EVERY_S = 0.05
# How long to wait for the job's store, and for ranks that evaluate or write a checkpoint.
_STORE_S, _BETWEEN_S = 600.0, 30 * 24 * 3600.0
# How many chunks of gradients are received ahead.
_AHEAD = 2


def serve(number: int) -> int:
    """Serve the ranks of this job until their script has ended."""
    # Ranks agree on their last step after a signal, for which they need the servers.
    stopped: list[int] = []
    for signum in not_ignored(*_STOPS):
        signal.signal(signum, lambda signum, _: stopped.append(signum))
    here = place()
    if here.nodes == 1:
        torch.set_num_threads(1)  # the ranks have the cores
    try:
        store, session = servers.open_store(_STORE_S), 0
        while (asked := _asked(store, session + 1, stopped)) is not None:
            session += 1
            _Session(store, session, number, *asked, same_node=here.nodes == 1).run()
    except RuntimeError as error:
        # A rank that has failed tells it itself, and the agent then ends this process.
        until = time.monotonic() + POLITE_S
        while not stopped and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        if not stopped:
            what = error.what if isinstance(error, WorldError) else str(error).split("\n")[0]
            say(f"server {number}: a rank has ended or does not answer ({what})")
        return LostRank.code
    return LostRank.code if stopped else 0


def _asked(store: Any, session: int, stopped: Sequence[int]) -> tuple[int, float] | None:
    with suppress(RuntimeError):  # the store ends with its agent, or with the first rank
        while not stopped:
            if store.check([f"session-{session}"]):
                ranks, timeout = store.get(f"session-{session}").decode().split()
                return int(ranks), float(timeout)
            if store.check([servers.OVER]):
                break
            time.sleep(_LOOK_EVERY_S)
    return None


class _Session:
    """From the begin of a fit to its end."""

    def __init__(
        self,
        store: Any,
        session: int,
        number: int,
        ranks: int,
        timeout_s: float,
        *,
        same_node: bool,
    ) -> None:
        self._links: list[Link] = []
        for rank in range(ranks):
            pair = servers.pair_of(
                *(store, session, number, rank), is_rank=False, timeout_s=timeout_s
            )
            if rank == 0:
                self._take(pair.hear())
            link = Link(
                pair,
                same_node=same_node,
                words=self._words,
                length=self._length_on_links(same_node),
                dtype=self._dtype,
            )
            self._links.append(link)
        self._timeout_s = timeout_s

    def _take(self, told: dict[str, Any]) -> None:
        self._told, self._words, self._dtype = told, told["words"], told["dtype"]
        self._clip_value = told.get("clip_value")
        self._shares: list[Share] = []
        for own in told["optimizers"]:
            kind, lengths = _KINDS[own["kind"]], own["lengths"]
            most = chunk_of(sum(lengths)) if self._waits else None
            share = Share(kind, own["groups"], lengths, self._dtype, most)
            share.take_states(dict(own["states"]))
            self._shares.append(share)
        self._groups = [len(own["groups"]) for own in told["optimizers"]]
        if not self._waits:
            return
        self._sums = [torch.zeros_like(share.values) for share in self._shares]
        self._chunks = [chunks_of(len(sums)) for sums in self._sums]
        ends = [sum(len(sums) for sums in self._sums[: n + 1]) for n in range(len(self._sums))]
        self._starts = [end - len(sums) for end, sums in zip(ends, self._sums, strict=True)]

    @property
    def _waits(self) -> bool:
        return "staleness" not in self._told

    def _length_on_links(self, same_node: bool) -> int:
        if not self._waits:
            return max(len(share.values) for share in self._shares)
        # What comes through the network is added up chunk by chunk.
        return sum(len(sums) for sums in self._sums) if same_node else 0

    def run(self) -> None:
        if self._waits:
            self._run_together()
        else:
            self._run_apart()

    def _run_apart(self) -> None:
        told, ranks = self._told, len(self._links)
        spare, bound = told["spare"], told["staleness"]
        makes, own = (SpareServer, spare) if spare else (Server, bound)
        server = makes(self._shares, ranks, own, self._timeout_s)
        dropped.come_to(told["times"])
        answers = Answers(server, self._words, self._groups, told["ids"], self._timeout_s)
        answers.start(dict(enumerate(self._links)))
        answers.join()
        dropped.may_end(())

    @torch.no_grad()
    def _run_together(self) -> None:
        first = self._links[0]
        while True:
            kind, at, factor, *told = first.words(self._words, _BETWEEN_S)
            number = int(at)
            if kind == END:
                return
            if kind == VALUES:
                self._take_values(number)
            elif kind == STATES:
                pairs = [link.pair for link in self._links[: int(told[0])]]
                tell_parts(pairs, list(self._shares[number].states().items()))
            elif kind == TAKE:
                self._shares[number].take_states(dict(first.pair.hear()))
            elif kind == TIMES:
                first.pair.tell(sum(share.update_ms() for share in self._shares))
            elif kind == STEP:
                self._step(number, factor, told)
            else:
                for link in self._links[1:]:
                    if link.words(self._words)[:2] != [kind, at]:
                        raise RuntimeError("ranks are not at the same step")
                if kind == GRADIENTS:
                    self._measure(number, factor)
                else:
                    self._whole_step(number, factor, told)

    def _own(self, number: int) -> slice:
        start = self._starts[number]
        return slice(start, start + len(self._sums[number]))

    def _take_values(self, number: int) -> None:
        first, values = self._links[0], self._shares[number].values
        if first.is_shared:
            values.copy_(first.up[self._own(number)])
            first.send(torch.zeros(1, dtype=torch.float64))
        else:
            first.data(values)

    def _add_up(self, number: int, factor: float) -> Iterator[slice]:
        """Add up the gradients of all ranks, chunk by chunk, in the order of the ranks."""
        sums, chunks = self._sums[number], self._chunks[number]
        coming: deque[list[tuple[torch.Tensor, Any]]] = deque()
        for at, chunk in enumerate(chunks):
            while len(coming) < _AHEAD and at + len(coming) < len(chunks):
                coming.append(self._begin(number, chunks[at + len(coming)]))
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

    def _begin(self, number: int, chunk: slice) -> list[tuple[torch.Tensor, Any]]:
        result: list[tuple[torch.Tensor, Any]] = []
        for link in self._links:
            if link.is_shared:
                result.append((link.up[self._own(number)][chunk], None))
            else:
                gradient = torch.empty_like(self._sums[number][chunk])
                result.append((gradient, link.pair.receive(gradient)))
        return result

    def _measure(self, number: int, factor: float) -> None:
        """Add gradients up, and tell all ranks whether they are finite, and their norm's square."""
        for _ in self._add_up(number, factor):
            pass
        sums = self._sums[number]
        square = torch.linalg.vector_norm(sums).double().square()
        answer = torch.stack([(~torch.isfinite(sums).all()).double(), square])
        for link in self._links:
            link.send(answer)

    def _step(self, number: int, factor: float, told: Sequence[float]) -> None:
        sums, share = self._sums[number], self._shares[number]
        if factor != 1.0:
            sums.mul_(factor)
        for own, piece in self._pieces(number, told):
            share.step_piece(piece, self._clipped(sums[own]))
        works: list[Any] = []
        for chunk in self._chunks[number]:
            works += self._send(number, chunk)
        self._finish(works)

    def _whole_step(self, number: int, factor: float, told: Sequence[float]) -> None:
        """Step each piece once its gradients are there, and send its weights back at once."""
        sums, share = self._sums[number], self._shares[number]
        pieces, waiting = deque(self._pieces(number, told)), deque(self._chunks[number])
        works: list[Any] = []
        for chunk in self._add_up(number, factor):
            while pieces and pieces[0][0].stop <= chunk.stop:
                own, piece = pieces.popleft()
                share.step_piece(piece, self._clipped(sums[own]))
            ready = min(pieces[0][0].start, chunk.stop) if pieces else chunk.stop
            while waiting and waiting[0].stop <= ready:
                works += self._send(number, waiting.popleft())
        self._finish(works)

    def _pieces(self, number: int, told: Sequence[float]) -> list[tuple[slice, Any]]:
        rates = 2 * self._groups[number]
        used = told[rates : rates + self._shares[number].parameters]
        return self._shares[number].pieces(list(told[:rates]), [bool(item) for item in used])

    def _clipped(self, gradient: torch.Tensor) -> torch.Tensor:
        limit = self._clip_value
        return gradient if limit is None else gradient.clamp_(-limit, limit)

    def _send(self, number: int, chunk: slice) -> list[Any]:
        weights, result = self._shares[number].values[chunk], []
        for link in self._links:
            if link.is_shared:
                link.down[self._own(number)][chunk].copy_(weights)
            else:
                result.append(link.pair.send(weights))
        return result

    def _finish(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()
        for link in self._links:
            if link.is_shared:
                link.send(torch.zeros(1, dtype=torch.float64))
