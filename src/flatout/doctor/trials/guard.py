"""Refuses forbidden actions of a trial's process by an audit hook, with a plain error.

Refused are connections to other machines: to anything except this machine's own addresses, Unix
sockets and the address where ranks meet. If files are redirected, writes that bypassed redirection
are refused too. Python raises audit events for both
(https://docs.python.org/3/library/audit_events.html). Native code raises none.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from types import FrameType
from typing import Any

from flatout.errors import FlatoutError

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Positions of an event's arguments that are paths to be changed.
_CHANGES = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.setxattr": (0,),
    "os.removexattr": (0,),
    "sqlite3.connect": (0,),
}
_OWN = (os.path.dirname(__file__), "<frozen")
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class Refused(FlatoutError, OSError):
    """Raised when a trial's process tries to reach beyond its trial."""


def install(note: str, writable: tuple[str, ...] | None) -> None:
    """Refuse forbidden actions in this process from now on.

    Args:
        note: file to which each refusal adds a line: {"what", "where", "kind"}.
        writable: folders whose files may change; None if the kernel contains files.
    """

    refusals: dict[str, Callable[[tuple[Any, ...]], None]] = {
        "socket.getaddrinfo": lambda args: _refuse_host(args[0], note),
        "socket.gethostbyname": lambda args: _refuse_host(args[0], note),
    }
    for event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        refusals[event] = partial(_refuse_address, note)
    if writable is not None:
        refusals["open"] = partial(_refuse_opening, writable, note)
        for event, places in _CHANGES.items():
            refusals[event] = partial(_refuse_change, places, writable, note)
    of_event = refusals.get

    # Python raises many events that are never refused, such as id(), several times in a step.
    def hook(event: str, args: tuple[Any, ...]) -> None:
        refuse = of_event(event)
        if refuse is not None:
            refuse(args)

    sys.addaudithook(hook)


def _refuse_opening(writable: tuple[str, ...], note: str, args: tuple[Any, ...]) -> None:
    path, mode, flags = args[:3]
    if isinstance(mode, str):
        is_writing = any(letter in mode for letter in "wax+")
    else:
        is_writing = bool(isinstance(flags, int) and flags & _WRITING)
    if is_writing:
        _refuse_outside(path, writable, note)


def _refuse_change(
    places: tuple[int, ...], writable: tuple[str, ...], note: str, args: tuple[Any, ...]
) -> None:
    for place in places:
        _refuse_outside(args[place], writable, note)


def _refuse_outside(path: Any, writable: tuple[str, ...], note: str) -> None:
    if isinstance(path, int) or path in ("", b"", ":memory:"):
        return
    text = os.path.abspath(os.fsdecode(path))
    if text.startswith("file:") or any(
        text == item or text.startswith(item + "/") for item in writable
    ):
        return
    _refuse("write", f"a trial must not change {text}, and nothing has redirected it", note)


def _refuse_address(note: str, args: tuple[Any, ...]) -> None:
    is_ip = args[0].family in (socket.AF_INET, socket.AF_INET6)
    if is_ip and isinstance(args[1], tuple):
        _refuse_host(args[1][0], note)


def _refuse_host(host: Any, note: str) -> None:
    if host is None:
        return
    name = host.decode() if isinstance(host, (bytes, bytearray)) else str(host)
    if name != os.environ.get("MASTER_ADDR") and not is_of_this_machine(name):
        _refuse("network", f"a trial may not send data to other machines, here to {name}", note)


@cache
def is_of_this_machine(name: str) -> bool:
    """Return True if an address or name belongs to this machine."""
    if name in ("", "localhost", "0.0.0.0", "::"):
        return True
    with suppress(ValueError):
        address = ipaddress.ip_address(name.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        return bool(mapped.is_loopback) or str(mapped) in _addresses()
    return name == socket.gethostname()


@cache
def _addresses() -> frozenset[str]:
    import psutil

    result = psutil.net_if_addrs().values()
    return frozenset(item.address.partition("%")[0] for some in result for item in some)


def _refuse(kind: str, what: str, note: str) -> None:
    where = user_line()
    # The hook lets this file pass. It is opened each time, since the script may close any file.
    with suppress(OSError), open(note, "a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, "what": what, "where": where}) + "\n")
    raise Refused(what, where=where)


def user_line() -> str:
    """Return the innermost line of the user's own code that is being run, as file:line."""
    frame: FrameType | None = sys._getframe(1)
    outermost = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            outermost = f"{file}:{frame.f_lineno}"
            if not file.startswith(_INSTALLED) and not file.startswith("<"):
                return outermost
        frame = frame.f_back
    return outermost
