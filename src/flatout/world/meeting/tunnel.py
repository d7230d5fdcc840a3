"""The connection of other nodes to the job's store, through a gate that requires the secret.

The store itself listens on loopback, because torch's store has no authentication. On the first node
a gate listens on the interface that leads to the other nodes. On each other node a port on loopback
represents the store, and forwards each connection to the gate. After the handshake, bytes are
passed on unchanged.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from flatout.errors import WorldError
from flatout.world.network import LOOPBACK, listen
from flatout.world.secret import admit, enter

_HANDSHAKE_S = 5.0
# _AT_ONCE: maximum number of threads for connections, so that peers without the secret cost no
# more. _PIECE:
# bytes that are passed on at a time.
_AT_ONCE = 64
_PIECE = 1 << 16
_AGAIN_S = 0.05


class Gate:
    """Passes connections of peers that know the secret to a port on loopback."""

    def __init__(self, listening: socket.socket, port: int) -> None:
        self._port = port
        self._strangers = threading.BoundedSemaphore(_AT_ONCE)
        self._listening = listening
        _serve(listening, self._receive)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _receive(self, peer: socket.socket) -> None:
        if not self._strangers.acquire(blocking=False):
            return
        try:
            peer.settimeout(_HANDSHAKE_S)
            if not admit(peer):
                return
        finally:
            self._strangers.release()
        with socket.create_connection((LOOPBACK, self._port)) as store:
            _carry(peer, store)


class Tunnel:
    """A port on loopback that represents the store of another node."""

    def __init__(self, host: str, port: int) -> None:
        self._gate = host, port
        listening = listen(LOOPBACK)
        self.port = int(listening.getsockname()[1])
        _serve(listening, self._lead)

    def _lead(self, peer: socket.socket) -> None:
        with entered(*self._gate) as gate:
            _carry(peer, gate)


def entered(host: str, port: int) -> socket.socket:
    gate = socket.create_connection((host, port), timeout=_HANDSHAKE_S)
    try:
        enter(gate)
    except BaseException:
        gate.close()
        raise
    return gate


def _serve(listening: socket.socket, receive: Callable[[socket.socket], None]) -> None:

    def one(peer: socket.socket) -> None:
        # The other end finds the connection closed, and reports it.
        with peer, suppress(OSError, WorldError):
            receive(peer)

    def all_() -> None:
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                if listening.fileno() < 0:
                    return
                time.sleep(_AGAIN_S)  # that peer is gone already, or there are too many
                continue
            try:
                threading.Thread(target=one, args=(peer,), daemon=True).start()
            except RuntimeError:  # no thread can be started now
                peer.close()

    threading.Thread(target=all_, daemon=True, name="flatout-tunnel").start()


def _carry(here: socket.socket, other: socket.socket) -> None:
    with selectors.DefaultSelector() as ready:
        for source, target in ((here, other), (other, here)):
            source.settimeout(None)
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready.register(source, selectors.EVENT_READ, target)
        while True:
            for key, _ in ready.select():
                piece = key.fileobj.recv(_PIECE)  # type: ignore[union-attr]
                if not piece:
                    return
                key.data.sendall(piece)
