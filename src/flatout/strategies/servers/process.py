"""A server's side: a process that runs no script, or a thread of a rank.

It knows neither the script nor the model. The first rank describes the optimizers to it, and the
number of values of each parameter that it has.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import torch

from flatout.console import say
from flatout.errors import WorldError
from flatout.processes import not_ignored
from flatout.strategies.servers.answers import AsynchronousAnswers, SynchronousAnswers
from flatout.strategies.servers.layout import chunk_of
from flatout.strategies.servers.link import Link
from flatout.strategies.servers.share import share_of
from flatout.world import POLITE_S, LostRank, place, servers

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK_EVERY_S = 0.05
# Maximum seconds to wait for the job's store.
_STORE_S = 600.0


def serve(number: int) -> int:
    """Serve the ranks of this job as a process, one fit after the other, until the script ends."""
    # After a signal, ranks agree on their last step, for which they still need the servers.
    stopped: list[int] = []
    for signum in not_ignored(*_STOPS):
        signal.signal(signum, lambda signum, _: stopped.append(signum))
    here = place()
    if here.nodes == 1:
        torch.set_num_threads(1)  # the ranks need the cores
    try:
        store, session = servers.open_store(_STORE_S), 0
        while (announced := _announced(store, session + 1, stopped)) is not None:
            session += 1
            ranks, timeout_s = announced
            _serve_fit(store, session, number, [here.nodes == 1] * ranks, timeout_s)
    except RuntimeError as error:
        # A failed rank reports its error itself, and the agent then ends this process.
        until = time.monotonic() + POLITE_S
        while not stopped and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        if not stopped:
            what = error.what if isinstance(error, WorldError) else str(error).split("\n")[0]
            say(f"server {number}: a rank has ended or does not answer ({what})")
        return LostRank.code
    return LostRank.code if stopped else 0


def _announced(store: Any, session: int, stopped: Sequence[int]) -> tuple[int, float] | None:
    with suppress(RuntimeError):  # the store ends with its agent, or with the first rank
        while not stopped:
            if store.check([f"session-{session}"]):
                ranks, timeout = store.get(f"session-{session}").decode().split()
                return int(ranks), float(timeout)
            if store.check([servers.OVER]):
                break
            time.sleep(_LOOK_EVERY_S)
    return None


def serve_in_thread(
    store: Any, session: int, number: int, are_here: Sequence[bool], timeout_s: float
) -> Thread:
    """Serve the ranks of one fit in a thread of this rank."""

    def run() -> None:
        with suppress(RuntimeError):  # a rank has ended; other ranks report it
            _serve_fit(store, session, number, are_here, timeout_s)

    # A daemon thread, because a failed rank must be able to end while threads wait for other ranks.
    thread = Thread(target=run, name="flatout-server", daemon=True)
    thread.start()
    return thread


def _serve_fit(
    store: Any, session: int, number: int, are_here: Sequence[bool], timeout_s: float
) -> None:
    links: list[Link] = []
    described: dict[str, Any] = {}
    for rank, is_here in enumerate(are_here):
        pair = servers.pair_of(*(store, session, number, rank), is_rank=False, timeout_s=timeout_s)
        if rank == 0:
            described = pair.receive_value()
            waits, dtype = described["waits"], described["dtype"]
            lengths = [sum(own["lengths"]) for own in described["optimizers"]]
        # A server that waits sums data from the network chunk by chunk, so needs no memory for all.
        length = sum(lengths) if is_here or not waits else 0
        links.append(
            Link(pair, same_node=is_here, words=described["words"], length=length, dtype=dtype)
        )
    shares = [
        share_of(own, dtype, chunk_of(length) if waits else None)
        for own, length in zip(described["optimizers"], lengths, strict=True)
    ]
    makes = SynchronousAnswers if waits else AsynchronousAnswers
    makes(links, shares, {**described, "timeout_s": timeout_s}).run()
