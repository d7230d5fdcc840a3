"""Where the nodes of a job meet: before its first rank, and whenever the ranks start again.

All of it goes through one store, which the first node keeps and the ranks use too.

    came                a line for each node that has come, with what it is about to run
    agreed, refused     the first node's verdict on them
    round/N             how many nodes have come to the N-th start of the ranks
    beat/NODE           changes while that node's agent lives
    ended               why the job is over
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from flatout.errors import WorldError
from flatout.world.agreement import Arrival, disagreement
from flatout.world.network import is_here, listener
from flatout.world.nodes import Nodes

T = TypeVar("T")

_LOOK_EVERY_S = 0.05
_BEAT_EVERY_S = 0.1
# After this long a node counts as silent, when the loss of a rank is to be explained.
_SILENCE_S = 5.0
# After this long people want to know what is being waited for, and again every minute.
_SAY_AFTER_S, _SAY_EVERY_S = 5.0, 60.0
# How long the first node stays so that the others hear why the job is over.
_LAST_WORDS_S = 5.0


class Rendezvous(RendezvousHandler):
    """The meeting of a fixed set of nodes, for torch.distributed's elastic agent.

    Node ranks are those that the nodes were given, and all ranks reach the first node by the name
    that the user gave it.

    Args:
        nodes: which node this is, and where they meet.
        facts: what must be the same on all nodes, by name.
        wait_s: how long nodes wait for one another, in seconds.
        silent_s: how long a node may be silent before the job ends, in seconds.

    Attributes:
        rounds: how often all nodes have met to start ranks.
    """

    def __init__(
        self, nodes: Nodes, facts: Mapping[str, str], *, wait_s: float, silent_s: float
    ) -> None:
        self.nodes = nodes
        self.rounds = 0
        self._wait_s = wait_s
        self._silent_s = silent_s
        host, _, port = nodes.rendezvous.rpartition(":")
        self._host, self._port = host or "127.0.0.1", int(port or 0)
        self._own = Arrival(
            node=nodes.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            key=uuid.uuid4().hex,
            facts={"--nodes": str(nodes.count), **facts},
        )
        self._hosts = {nodes.rank: self._own.host}
        self._heard: dict[int, tuple[bytes, float]] = {}
        # What the listening thread has found, and what it is to tell.
        self._trouble: str | None = None
        self._seen = (0, 0, 0)
        self._answered = time.monotonic()
        self._last_words: str | None = None
        self._over = threading.Event()
        self._listening: threading.Thread | None = None

    @property
    def where(self) -> str:
        """The rendezvous, for people."""
        return f"{self._host}:{self._port}"

    # -- before the first rank -------------------------------------------------------------------

    def open(self) -> None:
        """Meet the other nodes, and see that all are about to run the same.

        Raises:
            WorldError: the port is in use, a node does not come, or they disagree.
        """
        until = time.monotonic() + self._wait_s
        if self.nodes.rank == 0:
            self._store = self._keep_store()
            self._port = int(self._store.port)
        else:
            self._wait_for_port(until)
            self._store = self._reach_store()
        if self.nodes.count == 1:
            return
        if self.nodes.rank == 0:
            came = self._receive(until)
        else:
            came = _within(self._wait_s + 2 * _LAST_WORDS_S, lambda: self._arrive(until))
        self._hosts = {one.node: one.host for one in came}
        self._answered = time.monotonic()
        self._listening = threading.Thread(target=self._listen, daemon=True, name="flatout-nodes")
        self._listening.start()

    def _keep_store(self) -> Any:
        try:
            return TCPStore(
                "127.0.0.1",
                self._port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._silent_s),
            )
        except RuntimeError as error:
            holder = listener(self._port)
            raise WorldError(
                f"the nodes cannot meet at {self.where}: port {self._port} of this node "
                + (f"is in use by {holder}" if holder else f"cannot be taken: {_first(error)}"),
                where=f"node 0, {self._own.host}",
                do="choose another port with --rendezvous, the same on every node, or end what "
                "uses it",
            ) from error

    def _wait_for_port(self, until: float) -> None:
        """Until the first node listens; a name that nobody knows yet may come with it."""
        waiting = _Waiting()
        why = ""
        while True:
            try:
                socket.create_connection((self._host, self._port), timeout=2).close()
                return
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > until:
                raise WorldError(
                    f"node 0 did not open {self.where} within {self._wait_s:.0f} s ({why})",
                    where=f"node {self.nodes.rank}, {self._own.host}",
                    do="start node 0 on that host, with the same --rendezvous, and see that this "
                    "node reaches the port",
                )
            waiting.say(f"waiting for node 0 at {self.where} ({why})")
            time.sleep(4 * _LOOK_EVERY_S)

    def _reach_store(self) -> Any:
        try:
            return _within(self._silent_s, self._client)
        except RuntimeError as error:
            raise WorldError(
                f"what listens at {self.where} is not the first node of this job ({_first(error)})",
                where=f"node {self.nodes.rank}, {self._own.host}",
                do="start node 0 there, or choose another port with --rendezvous on every node",
            ) from error

    def _client(self) -> Any:
        return TCPStore(
            "127.0.0.1" if self.nodes.rank == 0 else self._host,
            self._port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._silent_s),
        )

    def _receive(self, until: float) -> list[Arrival]:
        """As the first node: look at each that comes, and tell all what is wrong, or who came."""
        waiting = _Waiting()
        came = [self._own]
        while len(came) < self.nodes.count:
            lines = self._store.get("came").splitlines() if self._store.check(["came"]) else []
            for line in lines[len(came) - 1 :]:
                came.append(Arrival.read(line))
                wrong = disagreement(came)
                if wrong is not None:
                    self._refuse(wrong, len(lines))
            missing = sorted(set(range(self.nodes.count)) - {one.node for one in came})
            if missing and time.monotonic() > until:
                self._refuse(self._nobody(missing), len(came) - 1)
            waiting.say(f"waiting at {self.where} for {_nodes(missing)} of {self.nodes.count}")
            time.sleep(_LOOK_EVERY_S)
        for one in came:
            self._store.set(f"beat/{one.node}", "")
        self._store.set("agreed", json.dumps([one.words() for one in came]))
        return came

    def _nobody(self, missing: list[int]) -> WorldError:
        elsewhere = (
            f"; {self._host} is no address of this node, where --node-rank 0 was started"
            if not is_here(self._host)
            else ""
        )
        return WorldError(
            f"{_nodes(missing)} of {self.nodes.count} did not come to {self.where} within "
            f"{self._wait_s:.0f} s{elsewhere}",
            where=f"node 0, {self._own.host}",
            do=f"start {_nodes(missing)} with the same --nodes and --rendezvous, and see that the "
            "port is reached from there",
        )

    def _refuse(self, error: WorldError, others: int) -> None:
        self._store.set("refused", json.dumps([error.what, error.where, error.do]))
        until = time.monotonic() + _LAST_WORDS_S
        while self._store.add("heard", 0) < others and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        raise error

    def _arrive(self, until: float) -> list[Arrival]:
        """As another node: say what is here, and wait for the first node's verdict."""
        waiting = _Waiting()
        try:
            self._store.append("came", self._own.words() + "\n")
            while not self._store.check(["agreed"]):
                if self._store.check(["refused"]):
                    what, where, do = json.loads(self._store.get("refused"))
                    self._store.add("heard", 1)
                    raise WorldError(what, where=where, do=do)
                if time.monotonic() > until + _LAST_WORDS_S:
                    raise WorldError(f"no verdict of node 0 came within {self._wait_s:.0f} s")
                waiting.say(f"at {self.where} with node 0, waiting for the other nodes")
                time.sleep(_LOOK_EVERY_S)
            came = [Arrival.read(one) for one in json.loads(self._store.get("agreed"))]
        except RuntimeError as error:
            if isinstance(error, WorldError):
                raise
            raise WorldError(
                f"node 0 at {self.where} ended before all nodes had come ({_first(error)})",
                where=f"node {self.nodes.rank}, {self._own.host}",
            ) from error
        if self._own.key not in {one.key for one in came}:
            there = next((one for one in came if one.node == self.nodes.rank), came[0])
            raise WorldError(
                f"the job at {self.where} has begun already, with {there} as node {there.node}",
                where=f"node {self.nodes.rank}, {self._own.host}",
                do="wait until it has ended, or choose another port with --rendezvous",
            )
        return came

    # -- while the ranks run ---------------------------------------------------------------------

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every node is ready to start its ranks.

        Raises:
            WorldError: the job is over on another node, or one is silent.
        """
        self.rounds += 1
        waiting = _Waiting()
        while self.nodes.count > 1 and self._seen[:2] != (self.rounds, self.nodes.count):
            self._look()
            waiting.say("waiting for the other nodes to start their ranks again")
            time.sleep(_LOOK_EVERY_S)
        return RendezvousInfo(
            PrefixStore(f"start-{self.rounds}", self._store),
            self.nodes.rank,
            self.nodes.count,
            RendezvousStoreInfo(self._host, self._port),
        )

    def num_nodes_waiting(self) -> int:
        """How many other nodes want all ranks to start again.

        Raises:
            WorldError: the job is over on another node, or one is silent.
        """
        if self.nodes.count == 1:
            return 0
        self._look()
        now, _, waiting = self._seen
        return waiting if now == self.rounds else 0

    def end(self, why: str) -> None:
        """Tell the other nodes that the job is over; the first node stays until they have heard."""
        if self._listening is not None and not self._over.is_set():
            self._last_words = f"node {self.nodes.rank} ({self._own.host}): {why}"
            self._over.set()
            self._listening.join(_LAST_WORDS_S)

    def silent(self) -> str:
        """Which node has not been heard of for some seconds, in words; "" where all have."""
        now = time.monotonic()
        return ", ".join(
            f"node {node} ({self._hosts[node]}) has been silent for {now - since:.0f} s"
            for node, (_, since) in sorted(self._heard.items())
            if now - since > _SILENCE_S
        )

    def _look(self) -> None:
        if self._trouble is None and time.monotonic() - self._answered > self._silent_s:
            self._trouble = self._lost_first
        if self._trouble is not None:
            raise WorldError(self._trouble, where=f"node {self.nodes.rank}, {self._own.host}")

    def _listen(self) -> None:
        """Beat and listen, in a thread: no call of a store returns while its host is cut off."""
        try:
            store = self._client()
            while not self._over.is_set():
                self._beat(store)
                if store.check(["ended"]):
                    why = store.get("ended").decode()
                    store.add("heard", 1)
                    # Where all have agreed to stop, the ranks of this node are about to end too.
                    self._over.wait(_LAST_WORDS_S)
                    self._trouble = self._trouble or why
                    return
                self._answered = time.monotonic()
                time.sleep(_BEAT_EVERY_S)
            if self._last_words is not None:
                store.set("ended", self._last_words)
                store.add("heard", int(self.nodes.rank > 0))
                # Who keeps the store stays until the others have heard.
                while self.nodes.rank == 0 and store.add("heard", 0) < self.nodes.count - 1:
                    time.sleep(_LOOK_EVERY_S)
        except RuntimeError:
            self._trouble = self._trouble or self._lost_first

    def _beat(self, store: Any) -> None:
        store.set(f"beat/{self.nodes.rank}", str(time.monotonic_ns()))
        others = [node for node in range(self.nodes.count) if node != self.nodes.rank]
        self._compare(others, store.multi_get([f"beat/{node}" for node in others]))
        now = self.rounds
        if now > self._seen[0]:
            store.add(f"round/{now}", 1)
        here, waiting = store.add(f"round/{now}", 0), store.add(f"round/{now + 1}", 0)
        self._seen = (now, here, waiting)

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
        """What it means that the store does not answer."""
        return f"node 0 ({self._hosts.get(0, self._host)}) at {self.where} does not answer any more"

    # -- what the agent wants to know besides ----------------------------------------------------

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet in this store."""
        return True

    def get_backend(self) -> str:
        """The name of this way to meet."""
        return "flatout"

    def get_run_id(self) -> str:
        """The name of the job."""
        return f"flatout-{self._own.key}"

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._over.is_set()

    def set_closed(self) -> None:
        """The job is over."""
        self._over.set()

    def shutdown(self) -> bool:
        """Nothing more will be asked."""
        self._over.set()
        return True


def _within(seconds: float, call: Callable[[], T]) -> T:
    """What a call gives that may never return.

    Raises:
        RuntimeError: it did not return in time.
    """
    found: Future[T] = Future()

    def work() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError as error:
        raise RuntimeError(f"no answer for {seconds:.0f} s") from error


class _Waiting:
    """Says now and then what is waited for."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SAY_AFTER_S

    def say(self, line: str) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SAY_EVERY_S
        print(f"flatout: {line}", file=sys.stderr, flush=True)


def _nodes(missing: list[int]) -> str:
    return f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"


def _first(error: BaseException) -> str:
    return str(error).split("\n")[0].strip()
