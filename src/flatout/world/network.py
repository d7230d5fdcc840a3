"""Facts about a node's network: the process on a port, and the interface to a host."""

from __future__ import annotations

import socket
from contextlib import suppress

import psutil

LOOPBACK = "127.0.0.1"

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the name of the interface through which ranks communicate."""

# Addresses reserved for examples. Their route is the route to all distant hosts; nothing is sent.
_FAR = (("192.0.2.1", 9), ("2001:db8::1", 9))


def listener(port: int) -> str:
    """Return the process that uses a TCP port of this node, in words; "" if it is hidden."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ""
    using = [
        connection
        for connection in connections
        if connection.laddr and connection.laddr.port == port
    ]
    using.sort(key=lambda value: value.status != psutil.CONN_LISTEN)
    if not using:
        return ""
    try:
        process = psutil.Process(using[0].pid)
        command = " ".join(process.cmdline()) or process.name()
        return f"process {process.pid} of {process.username()}: {command[:120]}"
    except (psutil.Error, TypeError, ValueError):
        return "a process of another user"


def is_here(host: str) -> bool:
    """Return True if a name or address is one of this node's, or one that is not known."""
    result = _addresses_of(host)
    return not result or _is_own(result)


def listening_address(host: str) -> str:
    """Return the own address through which other nodes reach this node by a name or address.

    A name may lead to loopback on its own host, or to a device that forwards packets, or not
    resolve yet. Then the result is the address from which this node reaches others.
    """
    result = _addresses_of(host)
    if result and (host == "localhost" or host in result):  # an address, as it was given
        result = [item for item in result if _is_loopback(item)] or result
        if _is_loopback(result[0]):
            return result[0]
    own = {address for _, address in _addresses()}
    near = [item for item in result if item in own and not _is_loopback(item)]
    if near:
        return near[0]
    for far in _FAR:
        with suppress(OSError):
            return source_address(*far)
    raise OSError(
        f"{host} is no address of this node, and none of its interfaces leads further; name its "
        "address in place of its name"
    )


def reached_at(host: str) -> str:
    """Return the address by which any node reaches the `listening_address` of a host.

    On the host itself its name may lead to loopback, where nothing listens.
    """
    result = _addresses_of(host)
    return listening_address(host) if result and _is_own(result) else host


def listen(address: str, port: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=1024)


def _addresses_of(host: str) -> list[str]:
    try:
        return [str(item[4][0]) for item in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        return []


def _is_own(found: list[str]) -> bool:
    own = {address for _, address in _addresses()}
    return any(_is_loopback(item) or item.partition("%")[0] in own for item in found)


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def source_address(host: str, port: int) -> str:
    """Return the own address from which packets to a host leave. Sends nothing."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the interface that has an address, such as eth0."""
    if _is_loopback(address):
        return "lo"  # all loopback addresses are its own, though it lists only one
    wanted = address.partition("%")[0]
    return next((interface for interface, item in _addresses() if item == wanted), None)


def _addresses() -> list[tuple[str, str]]:
    return [
        (interface, one.address.partition("%")[0])
        for interface, ones in psutil.net_if_addrs().items()
        for one in ones
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]
