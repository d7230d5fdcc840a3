"""Runs a script with its own process and network namespaces, or with one of both.

    supervisor           outside: knows all processes below by their IDs on this machine
      init           the first process inside: adopts orphans, and ends with the script
        script       sees and can signal only processes that are inside

With its own process namespace, the kernel kills everything inside at once when init ends, for any
reason. Without that namespace, only the script is killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from flatout.doctor.trials import namespaces, own_network
from flatout.processes import die_with_parent, not_ignored

_MESSAGE, _MOST_DESCRIPTORS = 65536, 250


@dataclass
class Apart:
    """A running script with its own namespaces.

    Attributes:
        init: process ID of init, a child of the process that called `start`.
        script: process ID of the script, as seen from outside.
        descriptor: pidfd of the script, for pidfd_send_signal.
        said: the message that `begin` returned, from inside the namespaces.
        services: sockets inside that listen on addresses of this machine's services outside.
    """

    init: int
    script: int
    descriptor: int
    said: Any
    services: list[socket.socket]
    _line: socket.socket

    def status(self) -> int:
        """Return the script's exit code, -N if signal N ended it; call it once init has ended."""
        data = b""  # without a message, init itself was killed, maybe with a message of ours unread
        with self._line, suppress(ConnectionResetError):
            data = self._line.recv(_MESSAGE)
        return int(json.loads(data)["exit"]) if data else -signal.SIGKILL


def start(begin: Callable[[], tuple[int, Any]], kinds: int, folder: Path) -> Apart:
    """Start a script with its own namespaces; the caller has one thread and adopts orphans."""
    machine = own_network.of_this_machine(folder) if kinds & namespaces.NETWORK else None
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    maker = os.fork()
    if not maker:
        here.close()
        _make(there, begin, kinds, machine)
    there.close()
    os.waitpid(maker, 0)  # from now on init is a child of this process, and does not die with maker
    init = 0
    try:
        init = int(_understood(here.recv(_MESSAGE))["init"])
        here.send(b"go")
        data, descriptors, _, _ = socket.recv_fds(here, _MESSAGE, _MOST_DESCRIPTORS)
        message = _understood(data)
        number = _number_of(descriptors[0])
        here.send(b"known")
    except OSError:
        here.close()
        if init:
            os.waitpid(init, 0)
        raise
    script, *listening = descriptors
    services = [socket.socket(fileno=item) for item in listening]
    return Apart(init, number, script, message["said"], services, here)


def _understood(data: bytes) -> dict[str, Any]:
    message = dict(json.loads(data)) if data else {"cannot": "it was killed"}
    if "cannot" in message:
        raise OSError(message["cannot"])
    return message


def _number_of(descriptor: int) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}") as fields:
        result = dict(line.split(":", 1) for line in fields)
    return int(result["Pid"])


def _make(
    line: socket.socket,
    begin: Callable[[], tuple[int, Any]],
    kinds: int,
    machine: own_network.Machine | None,
) -> NoReturn:
    try:
        namespaces.leave(namespaces.MOUNTS | kinds)
        init = os.fork()
        if not init:
            _be_init(line, begin, kinds, machine)
        _tell(line, {"init": init})
    except BaseException as error:
        _tell(line, {"cannot": f"{error}"})
    finally:
        os._exit(0)


def _be_init(
    line: socket.socket,
    begin: Callable[[], tuple[int, Any]],
    kinds: int,
    machine: own_network.Machine | None,
) -> NoReturn:
    try:
        # Init ends with the script. The script does not inherit these handlers.
        for number in not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        if not line.recv(_MESSAGE):
            os._exit(1)
        die_with_parent()  # if the parent has ended already, sending a message fails
        if kinds & namespaces.PROCESSES:
            namespaces.mount_own_proc()
        services = own_network.begin(machine) if machine is not None else []
        script, message = begin()
        descriptors = [os.pidfd_open(script), *(service.fileno() for service in services)]
        socket.send_fds(line, [json.dumps({"said": message}).encode()], descriptors)
        os.close(descriptors[0])
        for service in services:
            service.close()
        if line.recv(_MESSAGE):  # the script's process ID is not reused until this process reaps it
            _tell(line, {"exit": _ended(script)})
    except BaseException as error:
        _tell(line, {"cannot": f"{error}"})
    finally:
        os._exit(0)


def _ended(script: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == script:
            return os.waitstatus_to_exitcode(status)


def _tell(line: socket.socket, what: dict[str, Any]) -> None:
    with suppress(OSError):
        line.send(json.dumps(what).encode())
