"""The secret of a job: each participant proves that it knows the secret, without sending it.

On several nodes the user sets the same FLATOUT_SECRET on all. On one node the agent creates a
secret for its ranks.
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
    """Raised if the peer is no gate of Flatout."""


class Refused(WorldError):
    """Raised if one of the two sides does not know the secret of the other."""


def secret() -> bytes:
    """Return the secret of this job, or b"" if there is none."""
    return os.fsencode(os.environ.get(VARIABLE, ""))


def new_secret() -> str:
    return token_hex(32)


def admit(peer: socket.socket) -> bool:
    """Check that a connected peer knows the secret, and send the peer the result."""
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
    """Prove to a gate that this process knows the secret, and check that the gate knows it too."""
    try:
        greeting = _receive(gate, len(_GREETING) + _NONCE)
    except TimeoutError:
        raise UnknownPeer("it does not greet as Flatout does") from None
    if not greeting:
        raise ConnectionError("it has closed the connection")  # too many connect at once
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
    """Check that all ranks of a channel know the secret. All its ranks call this."""
    prove(rank, lambda value: messages.gather(value, size, channel))


def prove(rank: int, gather: Callable[[Any], list[Any]]) -> None:
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
