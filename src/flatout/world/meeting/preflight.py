"""The first meeting of a job's nodes, before its first rank, which checks that all run the same.

The first node keeps a store at the rendezvous, and decides:

    came                a line for each node that has come, with what it is about to run
    agreed, refused     the verdict; heard: number of nodes that know of a refusal
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from flatout.console import first_line, say
from flatout.errors import WorldError
from flatout.world.meeting.agreement import Arrival, disagreement
from flatout.world.meeting.tunnel import Gate, Tunnel, entered
from flatout.world.network import LOOPBACK, is_here, listen, listener, listening_address
from flatout.world.nodes import Nodes
from flatout.world.secret import VARIABLE, Refused, UnknownPeer, secret
from flatout.world.stores import connect_to, served

T = TypeVar("T")

_LOOK_EVERY_S = 0.05
# Seconds until the first message about the wait, and between messages.
_SAY_AFTER_S, _SAY_EVERY_S = 5.0, 60.0
# Seconds that the first node stays so that the others get its verdict.
_LAST_WORDS_S = 5.0


class Preflight:
    """The nodes' first meeting."""

    def __init__(
        self, nodes: Nodes, facts: Mapping[str, str], *, wait_s: float, answer_s: float
    ) -> None:
        self.nodes = nodes
        host, _, port = nodes.rendezvous.rpartition(":")
        self.host, self.port = host.strip("[]") or LOOPBACK, int(port or 0)
        self.address, self.store_port = LOOPBACK, 0
        self.own = Arrival(
            node=nodes.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            key=uuid.uuid4().hex,
            facts={
                "--nodes": str(nodes.count),
                **({"--servers": str(nodes.servers)} if nodes.servers else {}),
                **facts,
            },
        )
        self._gate: Gate | None = None
        self._wait_s = wait_s
        self._answer_s = answer_s

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def who(self) -> str:
        return f"node {self.nodes.rank}, {self.own.host}"

    def open(self) -> tuple[Any, list[Arrival]]:
        """Meet the other nodes, and return the store and the arrivals of all nodes."""
        until = time.monotonic() + self._wait_s
        if self.nodes.rank == 0:
            self._store = self._keep_store()
            alone = self.nodes.count == 1
            return self._store, [self.own] if alone else self._receive(until)
        self.address = self._enter(until)
        self.store_port = Tunnel(self.host, self.port).port
        self._store = within(self._answer_s, self.connect)
        came = within(self._wait_s + 2 * _LAST_WORDS_S, lambda: self._arrive(until))
        return self._store, came

    def _keep_store(self) -> Any:
        timeout = timedelta(seconds=self._answer_s)
        try:
            if self.nodes.count == 1:
                store = served(LOOPBACK, self.port, timeout)
            else:
                self.address = listening_address(self.host)
                listening = listen(self.address, self.port)
                store = served(LOOPBACK, 0, timeout)
                self._gate = Gate(listening, int(store.port))
        except (OSError, RuntimeError) as error:
            holder = listener(self.port)
            raise WorldError(
                f"the nodes cannot meet at {self.where}: port {self.port} of this node "
                + (f"is in use by {holder}" if holder else f"cannot be taken: {first_line(error)}"),
                where=self.who,
                do="choose another port with --rendezvous, the same on every node, or end what "
                "uses it",
            ) from error
        self.store_port = int(store.port)
        if self.nodes.count > 1 and not secret() and self.address != LOOPBACK:
            say(
                f"no {VARIABLE} is set: who reaches {self.where} can take part in this job; "
                "set the same long random one on every node"
            )
        return store

    def _enter(self, until: float) -> str:
        """Wait until the first node admits this one, and return the connection's own address."""
        waiting = Waiting()
        while True:
            try:
                with entered(self.host, self.port) as gate:
                    return str(gate.getsockname()[0])
            except UnknownPeer as error:
                raise WorldError(
                    f"what listens at {self.where} is not the first node of this job ({error})",
                    where=self.who,
                    do="start node 0 there, or choose another port with --rendezvous on every node",
                ) from error
            except Refused as error:
                raise WorldError(
                    f"node 0 at {self.where} and this one do not share a secret: {error}",
                    where=self.who,
                    do=f"set the same {VARIABLE} in the environment of flatout run on every node",
                ) from error
            except OSError as error:
                # The name may resolve once that node has started.
                why = error.strerror or str(error)
            if time.monotonic() > until:
                raise WorldError(
                    f"node 0 did not open {self.where} within {self._wait_s:.0f} s ({why})",
                    where=self.who,
                    do="start node 0 on that host, with the same --rendezvous, and see that this "
                    "node reaches the port",
                )
            waiting.say(f"waiting for node 0 at {self.where} ({why})")
            time.sleep(4 * _LOOK_EVERY_S)

    def close(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def connect(self) -> Any:
        return connect_to(LOOPBACK, self.store_port, timedelta(seconds=self._answer_s))

    def _receive(self, until: float) -> list[Arrival]:
        waiting = Waiting()
        came = [self.own]
        while len(came) < self.nodes.count:
            lines = self._store.get("came").splitlines() if self._store.check(["came"]) else []
            for line in lines[len(came) - 1 :]:
                came.append(Arrival.read(line))
                wrong = disagreement(came)
                if wrong is not None:
                    self._refuse(wrong, len(lines))
            missing = sorted(set(range(self.nodes.count)) - {item.node for item in came})
            if missing and time.monotonic() > until:
                self._refuse(self._missing_nodes(missing), len(came) - 1)
            waiting.say(f"waiting at {self.where} for {_nodes(missing)} of {self.nodes.count}")
            time.sleep(_LOOK_EVERY_S)
        for item in came:
            self._store.set(f"beat/{item.node}", "")
        self._store.set("agreed", json.dumps([item.words() for item in came]))
        return came

    def _missing_nodes(self, missing: list[int]) -> WorldError:
        elsewhere = (
            f"; {self.host} is no address of this node, where --node-rank 0 was started"
            if not is_here(self.host)
            else ""
        )
        return WorldError(
            f"{_nodes(missing)} of {self.nodes.count} did not come to {self.where} within "
            f"{self._wait_s:.0f} s{elsewhere}",
            where=self.who,
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
        waiting = Waiting()
        try:
            self._store.append("came", self.own.words() + "\n")
            while not self._store.check(["agreed"]):
                if self._store.check(["refused"]):
                    what, where, do = json.loads(self._store.get("refused"))
                    self._store.add("heard", 1)
                    raise WorldError(what, where=where, do=do)
                if time.monotonic() > until + _LAST_WORDS_S:
                    raise WorldError(f"no verdict of node 0 came within {self._wait_s:.0f} s")
                waiting.say(f"at {self.where} with node 0, waiting for the other nodes")
                time.sleep(_LOOK_EVERY_S)
            came = [Arrival.read(load) for load in json.loads(self._store.get("agreed"))]
        except RuntimeError as error:
            if isinstance(error, WorldError):
                raise
            raise WorldError(
                f"node 0 at {self.where} ended before all nodes had come ({first_line(error)})",
                where=self.who,
            ) from error
        if self.own.key not in {item.key for item in came}:
            there = next((item for item in came if item.node == self.nodes.rank), came[0])
            raise WorldError(
                f"the job at {self.where} has begun already, with {there} as node {there.node}",
                where=self.who,
                do="wait until it has ended, or choose another port with --rendezvous",
            )
        return came


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a call that may never return, such as one to a store that is cut off."""
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        raise RuntimeError(f"no answer for {seconds:.0f} s") from error


class Waiting:
    """Prints now and then what this process waits for."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SAY_AFTER_S

    def say(self, line: str) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SAY_EVERY_S
        say(line)


def _nodes(missing: list[int]) -> str:
    return f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
