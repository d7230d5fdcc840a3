"""What a node's network looks like: who listens on a port, and which interface leads where."""

from __future__ import annotations

import socket

import psutil


def listener(port: int) -> str:
    """The process that uses a TCP port of this node, in words; "" where that cannot be seen."""
    try:
        found = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    using = [one for one in found if one.laddr and one.laddr.port == port]
    using.sort(key=lambda one: one.status != psutil.CONN_LISTEN)
    if not using:
        return ""
    try:
        process = psutil.Process(using[0].pid)
        command = " ".join(process.cmdline()) or process.name()
        return f"process {process.pid} of {process.username()}: {command[:120]}"
    except (psutil.Error, TypeError, ValueError):
        return "a process of another user"


def is_here(host: str) -> bool:
    """Whether a name or address is one of this node's; so it is taken to be if nobody knows it."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return True
    return bool(addresses & {address for _, address in _addresses()})


def address_towards(host: str, port: int) -> str:
    """The own address from which packets to a host leave; nothing is sent.

    Raises:
        OSError: there is no way there.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has an address, such as eth0."""
    if address.startswith("127."):
        return "lo"  # all of them are its own, though it lists only one
    wanted = address.partition("%")[0]
    return next((interface for interface, one in _addresses() if one == wanted), None)


def _addresses() -> list[tuple[str, str]]:
    """Interfaces and their addresses, without the scope of an IPv6 address."""
    return [
        (interface, one.address.partition("%")[0])
        for interface, ones in psutil.net_if_addrs().items()
        for one in ones
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]
