"""The secret of a job: who takes part shows that it knows it, and never sends it.

On several nodes the user gives it, the same on all, as FLATOUT_SECRET. On one node the agent makes
one for its ranks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
from collections.abc import Callable
from secrets import token_bytes, token_hex
from typing import Any

from flatout.errors import WorldError
from flatout.world import messages

VARIABLE = "FLATOUT_SECRET"

_GREETING = b"flatout 1 "
_NONCE, _PROOF = 32, 32
_YES, _NO = b"y", b"n"


class UnknownPeer(WorldError):
    """The error that no gate of Flatout listens there."""


class Refused(WorldError):
    """One of the two sides does not know the secret of the other."""


def secret() -> bytes:
    """Return the secret of this job; empty where none was given."""
    return os.fsencode(os.environ.get(VARIABLE, ""))


def new_secret() -> str:
    """One that cannot be guessed."""
    return token_hex(32)


def admit(peer: socket.socket) -> bool:
    """Return True if the peer that has connected knows the secret; the peer learns the answer."""
    own = token_bytes(_NONCE)
    peer.sendall(_GREETING + own)
    answer = _receive(peer, _NONCE + _PROOF)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(b"enter", own, theirs)):
        peer.sendall(_NO)
        return False
    peer.sendall(_YES + _proof(b"admit", theirs, own))
    return True


def enter(gate: socket.socket) -> None:
    """Show who listens there that this process knows the secret, and see that it does too."""
    try:
        greeting = _receive(gate, len(_GREETING) + _NONCE)
    except TimeoutError:
        raise UnknownPeer("it does not greet as Flatout does") from None
    if not greeting:
        raise ConnectionError("it has closed the connection")  # too many come at once
    if not greeting.startswith(_GREETING):
        raise UnknownPeer("it does not greet as Flatout does")
    theirs, own = greeting[len(_GREETING) :], token_bytes(_NONCE)
    gate.sendall(own + _proof(b"enter", theirs, own))
    answer = _receive(gate, 1)
    if not answer:
        raise ConnectionError("it has closed the connection")
    if answer != _YES:
        raise Refused(f"{VARIABLE} is not the same there")
    if not hmac.compare_digest(_receive(gate, _PROOF), _proof(b"admit", own, theirs)):
        raise Refused(f"who listens there does not know {VARIABLE}")


def check_channel(rank: int, size: int, channel: Any = None) -> None:
    """See that all who have joined a channel know the secret; all its ranks call it."""
    prove(rank, lambda value: messages.gather(value, size, channel))


def prove(rank: int, gather: Callable[[Any], list[Any]]) -> None:
    """Prove the secret where the messages of all peers travel in another way."""
    if not secret():
        return
    nonces = [str(item).encode() for item in gather(token_hex(_NONCE))]
    own = _proof(b"rank", *nonces, str(rank).encode()).hex()
    for other, proof in enumerate(gather(own)):
        expected = _proof(b"rank", *nonces, str(other).encode()).hex()
        if not (isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())):
            raise WorldError(
                f"rank {other} of this channel does not know the secret of the job",
                do=f"give all ranks the same {VARIABLE}, and see who else reaches their ports",
            )


def _proof(role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret(), b"|".join((role, *parts)), hashlib.sha256)


def _receive(peer: socket.socket, count: int) -> bytes:
    result = b""
    while len(result) < count:
        part = peer.recv(count - len(result))
        if not part:
            break
        result += part
    return result
