import os
import socket
import threading

import pytest

from flatout.world.meeting.tunnel import Gate, Tunnel, entered
from flatout.world.network import listen
from flatout.world.secret import Refused, UnknownPeer, admit, new_secret, secret

LOOPBACK = "127.0.0.1"


@pytest.fixture
def echo():
    """A port that answers with what it gets, in capitals."""
    listening = listen(LOOPBACK)

    def serve():
        while True:
            try:
                peer, _ = listening.accept()
            except OSError:
                return
            with peer:
                while piece := peer.recv(1 << 16):
                    peer.sendall(piece.upper())

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1]
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


@pytest.fixture
def gate(echo):
    listening = listen(LOOPBACK)
    gate = Gate(listening, echo)
    yield listening.getsockname()[1]
    gate.close()


def say(peer, words):
    peer.sendall(words)
    found = b""
    while len(found) < len(words):
        piece = peer.recv(1 << 16)
        assert piece
        found += piece
    return found


def test_who_knows_the_secret_comes_through(gate, monkeypatch):
    monkeypatch.setenv("FLATOUT_SECRET", "one")
    way = Tunnel(LOOPBACK, gate)
    for _ in range(3):
        with socket.create_connection((LOOPBACK, way.port)) as peer:
            assert say(peer, b"a" * 300_000) == b"A" * 300_000
            assert say(peer, b"b") == b"B"


def test_who_does_not_is_told_so(gate, monkeypatch):
    # Both sides live in this process: the gate asks first.
    answers = iter([b"another", b"one"])
    monkeypatch.setattr("flatout.world.secret.secret", lambda: next(answers))
    with pytest.raises(Refused, match="not the same"):
        entered(LOOPBACK, gate)


@pytest.mark.parametrize("said", [b"", b"x", bytes(64), b"GET / HTTP/1.0\r\n\r\n" * 3])
def test_strangers_are_cut_off_and_the_next_comes_through(gate, said):
    with socket.create_connection((LOOPBACK, gate)) as peer:
        peer.sendall(said)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(20)
        found = b""
        while piece := peer.recv(1 << 16):
            found += piece
        assert found.startswith(b"flatout 1 ")
        assert b"y" not in found[len(b"flatout 1 ") + 32 :]
    with entered(LOOPBACK, gate) as peer:
        assert say(peer, b"a") == b"A"


def test_many_strangers_at_once_are_turned_away(gate):
    peers = [socket.create_connection((LOOPBACK, gate)) for _ in range(80)]
    greeted = 0
    for peer in peers:
        peer.settimeout(20)
        greeted += peer.recv(1) == b"f"
    # Who knows the secret is no stranger for that, and comes again.
    with pytest.raises(ConnectionError, match="has closed the connection"):
        entered(LOOPBACK, gate)
    for peer in peers:
        peer.close()
    assert greeted == 64


@pytest.mark.slow
def test_what_listens_there_is_no_gate(echo):
    with pytest.raises(UnknownPeer):
        entered(LOOPBACK, echo)


def test_a_gate_that_does_not_know_the_secret_is_found_out():
    """It lets all in, to be taken for the first node."""
    listening = listen(LOOPBACK)

    def serve():
        peer, _ = listening.accept()
        with peer:
            peer.sendall(b"flatout 1 " + bytes(32))
            peer.recv(64)
            peer.sendall(b"y" + bytes(32))

    threading.Thread(target=serve, daemon=True).start()
    with listening, pytest.raises(Refused, match="does not know"):
        entered(LOOPBACK, listening.getsockname()[1])


def test_a_gate_that_ends_amid_the_handshake_has_not_refused():
    listening = listen(LOOPBACK)

    def serve():
        peer, _ = listening.accept()
        with peer:
            peer.sendall(b"flatout 1 " + bytes(32))
            peer.recv(64)

    threading.Thread(target=serve, daemon=True).start()
    with listening, pytest.raises(ConnectionError, match="has closed the connection"):
        entered(LOOPBACK, listening.getsockname()[1])


def test_a_gate_goes_on_when_threads_cannot_be_started(gate, monkeypatch):
    way = Tunnel(LOOPBACK, gate)
    start, failed = threading.Thread.start, threading.Event()

    def fails(thread):
        failed.set()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with socket.create_connection((LOOPBACK, way.port)) as peer:
            assert peer.recv(1) == b""
    assert failed.is_set()
    assert threading.Thread.start is start
    with socket.create_connection((LOOPBACK, way.port)) as peer:
        assert say(peer, b"a") == b"A"


def test_the_secret_may_be_any_bytes(gate, monkeypatch):
    monkeypatch.setenv("FLATOUT_SECRET", os.fsdecode(b"\xff\xfe"))
    assert secret() == b"\xff\xfe"
    with entered(LOOPBACK, gate) as peer:
        assert say(peer, b"a") == b"A"


def test_the_secret_is_never_sent(monkeypatch):
    monkeypatch.setenv("FLATOUT_SECRET", new_secret())
    ours, theirs = socket.socketpair()
    sent = []

    class Seen:
        def sendall(self, words):
            sent.append(words)
            ours.sendall(words)

        def recv(self, count):
            return ours.recv(count)

    def stranger():
        theirs.recv(42)
        theirs.sendall(bytes(64))

    threading.Thread(target=stranger, daemon=True).start()
    assert not admit(Seen())
    said = b"".join(sent)
    assert secret() not in said
    assert bytes.fromhex(secret().decode()) not in said
