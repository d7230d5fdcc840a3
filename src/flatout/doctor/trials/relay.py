"""Relays connections from a trial's own network to services of this machine."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

_CHUNK = 1 << 18


def relay(services: Sequence[socket.socket]) -> NoReturn:
    """Accept connections on sockets that listen in the trial's network, forever.

    Each connection is relayed to the same address and port in this process' own network.
    """
    waiting = selectors.DefaultSelector()
    for service in services:
        waiting.register(service, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            assert isinstance(key.fileobj, socket.socket)
            with suppress(OSError):
                inside, _ = key.fileobj.accept()
                threading.Thread(target=_join, args=(inside,), daemon=True).start()


def _join(inside: socket.socket) -> None:
    with suppress(OSError), inside, socket.socket(inside.family) as outside:
        outside.connect(inside.getsockname())
        for item in (inside, outside):
            item.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_copy, args=(outside, inside), daemon=True)
        back.start()
        _copy(inside, outside)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while read := source.recv(_CHUNK):
            target.sendall(read)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
