"""The meeting of a job's nodes: before its first rank, and whenever the ranks start again.

All of it uses one store, which the first node keeps and the ranks use too. In addition to the keys
of the preflight, it has

    round/N             number of nodes that have come to the N-th start of the ranks;
    done/N              number of nodes whose ranks have all ended well since then;
    beat/NODE           changes while that node's agent lives;
    ended               the reason why the job is over; heard: number of nodes that know it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from flatout.console import say
from flatout.errors import WorldError
from flatout.words import counted
from flatout.world.meeting.agreement import RANKS, Arrival
from flatout.world.meeting.preflight import Preflight, Waiting
from flatout.world.network import LOOPBACK, interface_of
from flatout.world.nodes import Nodes, check_devices

_LOOK_EVERY_S = 0.05
_BEAT_EVERY_S = 0.1
# Seconds after which a node counts as silent in the explanation of a lost rank.
_SILENCE_S = 5.0
# Key of the signal that stopped a node with only a server.
_STOP = "stopped"


class _NodeCounts(NamedTuple):
    """Numbers of nodes that have come to a start, want the next start, and are done."""

    round: int
    here: int
    waiting: int
    done: int


class Rendezvous(RendezvousHandler):
    """The meeting of a fixed set of nodes, for torch.distributed's elastic agent.

    Each node keeps the rank that it was given, and all ranks reach the first node by the name that
    the user gave.

    Args:
        wait_s: the most seconds that nodes wait for one another.
        silent_s: the most seconds that a node may be silent before the job ends.
        last_words_s: seconds that the first node stays, so that other nodes receive the reason of
            the end.

    Attributes:
        rounds: the number of times that all nodes have met to start ranks.
        stop: on the first node, the signal that stopped a node with only a server; 0 if none was
            stopped.
    """

    def __init__(
        self,
        nodes: Nodes,
        facts: Mapping[str, str],
        *,
        wait_s: float,
        silent_s: float,
        last_words_s: float = 5.0,
    ) -> None:
        self.nodes = nodes
        self.rounds = 0
        self.stop = 0
        self._silent_s, self._last_words_s = silent_s, last_words_s
        self._preflight = Preflight(nodes, facts, wait_s=wait_s, answer_s=silent_s)
        self._own = self._preflight.own
        self._hosts = {nodes.rank: self._own.host}
        self._heard: dict[int, tuple[bytes, float]] = {}
        # Results of the listening thread, and messages that it sends.
        self._trouble: str | None = None
        self._counts = _NodeCounts(0, 0, 0, 0)
        self._done = 0
        self._told = (0, 0)
        self._answered = time.monotonic()
        self._last_words: str | None = None
        self._own_stop = 0
        self._over = threading.Event()
        self._listening: threading.Thread | None = None

    def open(self) -> None:
        """Meet the other nodes, and check that all are about to run the same.

        Raises:
            WorldError: the port is in use, a node does not come, or nodes disagree.
        """
        self._store, came = self._preflight.open()
        if self.nodes.count == 1:
            return
        self._hosts = {item.node: item.host for item in came}
        self._answered = time.monotonic()
        self._listening = threading.Thread(target=self._listen, daemon=True, name="flatout-nodes")
        self._listening.start()
        if self.nodes.is_open:
            self._take_ranks(came)

    def _take_ranks(self, came: list[Arrival]) -> None:
        (first,) = (item for item in came if item.node == 0)
        ranks = int(first.facts[RANKS])
        try:
            check_devices(ranks)
        except WorldError as error:
            self.end(error.what)
            raise
        say(f"{counted(ranks, 'rank')}, as node 0 ({first.host}) has measured")
        self.nodes = replace(self.nodes, ranks=ranks, is_open=False)

    # -- while the ranks run ---------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every node is ready to start its ranks.

        Raises:
            WorldError: the job is over on another node, or one is silent.
        """
        self.rounds += 1
        waiting = Waiting()
        while self.nodes.count > 1 and not self._all_here():
            self._check_others()
            waiting.say("waiting for the other nodes to start their ranks again")
            time.sleep(_LOOK_EVERY_S)
        # On one node, no other process needs the agent's messages to itself.
        store = HashStore() if self.nodes.count == 1 else self._store
        return RendezvousInfo(
            PrefixStore(f"start-{self.rounds}", store),
            self.nodes.rank,
            self.nodes.count,
            RendezvousStoreInfo(LOOPBACK, self._preflight.store_port),
        )

    def interface(self) -> str | None:
        """The interface through which the ranks of all nodes communicate."""
        return interface_of(self._preflight.address)

    @property
    def store_port(self) -> int:
        """The port of the store, on loopback of this node."""
        return self._preflight.store_port

    def _all_here(self) -> bool:
        result = self._counts
        return (result.round, result.here) == (self.rounds, self.nodes.count)

    def num_nodes_waiting(self) -> int:
        """Return the number of other nodes that want all ranks to start again."""
        if self.nodes.count == 1:
            return 0
        self._check_others()
        result = self._counts
        return result.waiting if result.round == self.rounds else 0

    def finished(self) -> bool:
        """Report that this node's ranks have ended well, and return whether those of all nodes
        have.
        """
        if self.nodes.count == 1:
            return True
        self._done = self.rounds
        self._check_others()
        result = self._counts
        return (result.round, result.done) == (self.rounds, self.nodes.count)

    def end(self, why: str) -> None:
        """Report to other nodes that the job is over. The first node stays until they know."""
        if self._listening is not None and not self._over.is_set():
            self._last_words = f"node {self.nodes.rank} ({self._own.host}): {why}"
            self._over.set()
            self._listening.join(self._last_words_s)

    def report_stop(self, signum: int) -> None:
        """Note a stop signal of this node. A node without ranks reports it to the first node."""
        if self.nodes.rank >= self.nodes.computing:
            self._own_stop = signum

    def silent(self) -> str:
        """Return the nodes that have been silent for some seconds, in words, or ""."""
        now = time.monotonic()
        return ", ".join(
            f"node {node} ({self._hosts[node]}) has been silent for {now - since:.0f} s"
            for node, (_, since) in sorted(self._heard.items())
            if now - since > _SILENCE_S
        )

    def _check_others(self) -> None:
        if self._trouble is None and time.monotonic() - self._answered > self._silent_s:
            self._trouble = self._lost_first
        if self._trouble is not None:
            raise WorldError(self._trouble, where=self._preflight.who)

    def _listen(self) -> None:
        try:
            store = self._preflight.connect()
            while not self._over.is_set():
                self._beat(store)
                if store.check(["ended"]):
                    why = store.get("ended").decode()
                    store.add("heard", 1)
                    # If all nodes have agreed to stop, the ranks of this node are also about to
                    # end.
                    self._over.wait(self._last_words_s)
                    self._trouble = self._trouble or why
                    return
                self._answered = time.monotonic()
                time.sleep(_BEAT_EVERY_S)
            if self._last_words is not None:
                store.set("ended", self._last_words)
                store.add("heard", int(self.nodes.rank > 0))
                # The node that keeps the store stays until the others know.
                while self.nodes.rank == 0 and store.add("heard", 0) < self.nodes.count - 1:
                    time.sleep(_LOOK_EVERY_S)
        except RuntimeError:
            self._trouble = self._trouble or self._lost_first

    def _beat(self, store: Any) -> None:
        store.set(f"beat/{self.nodes.rank}", str(time.monotonic_ns()))
        others = [node for node in range(self.nodes.count) if node != self.nodes.rank]
        self._compare(others, store.multi_get([f"beat/{node}" for node in others]))
        now, done = self.rounds, self._done
        self._counts = _NodeCounts(
            round=now,
            here=store.add(f"round/{now}", int(now > self._told[0])),
            waiting=store.add(f"round/{now + 1}", 0),
            done=store.add(f"done/{done}", int(done > self._told[1])) if done == now else 0,
        )
        self._told = (now, done)
        if self._own_stop:
            store.set(_STOP, str(self._own_stop))
        elif self.nodes.rank == 0 and self.nodes.servers and store.check([_STOP]):
            self.stop = int(store.get(_STOP))

    def _compare(self, others: list[int], beats: list[bytes]) -> None:
        now = time.monotonic()
        for node, beat in zip(others, beats, strict=True):
            before, since = self._heard.get(node, (b"", now))
            if beat != before or node not in self._heard:
                self._heard[node] = (beat, now)
            elif now - since > self._silent_s and self._trouble is None:
                self._trouble = (
                    f"node {node} ({self._hosts[node]}) does not answer any more: nothing was "
                    f"heard of it for {self._silent_s:.0f} s"
                )

    @property
    def _lost_first(self) -> str:
        where = self._preflight.where
        return f"node 0 ({self._hosts[0]}) at {where} does not answer any more"

    # -- further methods for the agent ------------------------------------------------------------

    @property
    def use_agent_store(self) -> bool:
        """True, because ranks meet in this store."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous backend."""
        return "flatout"

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return f"flatout-{self._own.key}"

    def is_closed(self) -> bool:
        """Return True if the job is over."""
        return self._over.is_set()

    def set_closed(self) -> None:
        """Note that the job is over."""
        self._over.set()

    def shutdown(self) -> bool:
        """End the rendezvous: the agent asks nothing more."""
        self._over.set()
        if self._listening is not None:
            # Python must not end while its own thread is about to leave the store's C++.
            self._listening.join(self._last_words_s)
        self._preflight.close()
        return True
