"""How other nodes reach the job's store: through a gate that asks for the secret.

The store itself listens on loopback, since torch's has no authentication. On the first node a gate
listens on the interface that leads to the other nodes. On these a port on loopback stands for the
store, from which each connection goes to the gate. Behind the handshake bytes pass as they are.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from flatout.errors import WorldError
from flatout.world.secret import admit, enter

_HANDSHAKE_S = 5.0
# Who does not know the secret must not cost more than so many threads.
_AT_ONCE = 64
_PIECE = 1 << 16

Connect = Callable[[], socket.socket]


class Gate:
    """Lets connections of those who know the secret through to a port on loopback.

    Args:
        listening: where the other nodes come.
        port: of the store, on loopback.
    """

    def __init__(self, listening: socket.socket, port: int) -> None:
        self._port = port
        self._strangers = threading.BoundedSemaphore(_AT_ONCE)
        _serve(listening, self._receive)

    def _receive(self, peer: socket.socket) -> None:
        if not self._strangers.acquire(blocking=False):
            return
        try:
            peer.settimeout(_HANDSHAKE_S)
            if not admit(peer):
                return
        finally:
            self._strangers.release()
        with socket.create_connection(("127.0.0.1", self._port)) as store:
            _carry(peer, store)


class Way:
    """A port on loopback that stands for the store of another node.

    Args:
        host, port: of the gate.

    Attributes:
        port: on loopback.
    """

    def __init__(self, host: str, port: int) -> None:
        self._gate = host, port
        listening = loopback()
        self.port = int(listening.getsockname()[1])
        _serve(listening, self._lead)

    def _lead(self, peer: socket.socket) -> None:
        with entered(*self._gate) as gate:
            _carry(peer, gate)


def loopback(port: int = 0) -> socket.socket:
    """A socket that listens on loopback.

    Args:
        port: 0 takes a free one.

    Raises:
        OSError: the port is in use.
    """
    return socket.create_server(("127.0.0.1", port), backlog=1024)


def entered(host: str, port: int) -> socket.socket:
    """A connection through a gate.

    Raises:
        OSError: nothing listens there.
        Stranger, Refused: as of `enter`.
    """
    gate = socket.create_connection((host, port), timeout=_HANDSHAKE_S)
    try:
        enter(gate)
    except BaseException:
        gate.close()
        raise
    return gate


def _serve(listening: socket.socket, receive: Callable[[socket.socket], None]) -> None:
    """Receive each that connects in a thread of its own, while this process lives."""

    def one(peer: socket.socket) -> None:
        # Its other end finds the connection closed, and tells.
        with peer, suppress(OSError, WorldError):
            receive(peer)

    def all_() -> None:
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                continue  # that one is gone already
            threading.Thread(target=one, args=(peer,), daemon=True).start()

    threading.Thread(target=all_, daemon=True, name="flatout-tunnel").start()


def _carry(one: socket.socket, other: socket.socket) -> None:
    """Pass on what comes from either side, until one of them has ended."""
    with selectors.DefaultSelector() as ready:
        for source, target in ((one, other), (other, one)):
            source.settimeout(None)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready.register(source, selectors.EVENT_READ, target)
        while True:
            for key, _ in ready.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                piece = source.recv(_PIECE)
                if not piece:
                    return
                key.data.sendall(piece)
