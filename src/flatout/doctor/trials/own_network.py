"""A trial's own network, from which neither native code nor subprocesses can reach outside.

The network has this machine's own addresses and name, so that ranks can meet inside. relay.py
connects it to services that listen on this machine when the trial begins: sockets made inside
listen on their addresses, and a process outside accepts connections. Only TCP is relayed.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flatout.doctor.trials import namespaces
from flatout.doctor.trials.guard import is_of_this_machine

# Values from <linux/sockios.h> and <net/if.h>.
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 1
_SET_ADDRESS, _SET_MASK = 0x8916, 0x891C
_LOOPBACK = "lo"
_LISTENS = "0A"
_HOSTS = "/etc/hosts"
_MOST_SERVICES = 200
# Options with the address where torchrun's ranks meet.
_MEETING = ("--rdzv-endpoint", "--rdzv_endpoint", "--master-addr", "--master_addr")


@dataclass(frozen=True)
class Machine:
    """Parts of this machine's network that a trial's network imitates.

    Attributes:
        addresses: the machine's addresses, without loopback.
        services: address and port of each TCP service that listens on this machine.
        folder: folder for a file that the trial's network needs.
    """

    addresses: tuple[str, ...]
    services: tuple[tuple[str, int], ...]
    folder: Path


def of_this_machine(folder: Path) -> Machine:
    """Return the current state of the machine's network, as this process sees it."""
    result = [item.address for some in psutil.net_if_addrs().values() for item in some]
    addresses = []
    for text in result:
        with suppress(ValueError):  # hardware addresses, and addresses of a single link
            address = ipaddress.ip_address(text)
            if not (address.is_loopback or address.is_link_local):
                addresses.append(text)
    return Machine(tuple(dict.fromkeys(addresses)), tuple(_services()), folder)


def _services() -> list[tuple[str, int]]:
    result = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state = line.split()[:4]
                if state == _LISTENS:
                    address, port = _address_of(local, family)
                    result.append((address.removeprefix("::ffff:"), port))
                    if address == "::":  # such a service usually accepts IPv4 connections too
                        result.append(("0.0.0.0", port))
    return list(dict.fromkeys(result))[:_MOST_SERVICES]


def _address_of(text: str, family: int) -> tuple[str, int]:
    address, _, port = text.partition(":")
    words = [int(address[begin : begin + 8], 16) for begin in range(0, len(address), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)


def begin(machine: Machine) -> list[socket.socket]:
    """Set up a new network that has only a loopback, from within its own mounts."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ip4:
        asked = struct.pack("16sh14x", _LOOPBACK.encode(), 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(ip4, _GET_FLAGS, asked))
        fcntl.ioctl(ip4, _SET_FLAGS, struct.pack("16sh14x", _LOOPBACK.encode(), flags | _IS_UP))
        for number, address in enumerate(machine.addresses):
            if ":" not in address:
                _add4(ip4, f"{_LOOPBACK}:{number}", address)
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as ip6:
        for address in machine.addresses:
            if ":" in address:
                bits = socket.inet_pton(socket.AF_INET6, address)
                asked = bits + struct.pack("Ii", 128, socket.if_nametoindex(_LOOPBACK))
                fcntl.ioctl(ip6, _SET_ADDRESS, asked)
    _name_itself(machine)
    for name in os.environ:
        if name.endswith("_SOCKET_IFNAME"):  # interface of gloo, NCCL or similar
            os.environ[name] = _LOOPBACK
    return [item for item in map(_listening, machine.services) if item is not None]


def _add4(control: socket.socket, name: str, address: str) -> None:
    # With a mask for this address alone: the loopback's own mask would cover a whole network.
    for ask, text in ((_SET_ADDRESS, address), (_SET_MASK, "255.255.255.255")):
        bits = socket.inet_aton(text)
        fcntl.ioctl(control, ask, struct.pack("16sH2x4s8x", name.encode(), socket.AF_INET, bits))


def _name_itself(machine: Machine) -> None:
    with suppress(OSError):
        known, own = Path(_HOSTS).read_text(), socket.gethostname()
        if own not in known.split():
            hosts = machine.folder / "hosts"
            hosts.write_text(f"{known}\n{next(iter(machine.addresses), '127.0.0.1')} {own}\n")
            namespaces.mount(str(hosts), _HOSTS, "", namespaces.BIND)


def _listening(where: tuple[str, int]) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    result = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            result.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        result.bind(where)
        result.listen()
    except OSError:
        result.close()
        return None
    return result


def meets_elsewhere(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> str:
    """Return the name of another machine where a script's ranks meet; "" if they meet here."""
    places = [variables.get("MASTER_ADDR", "")]
    for option, after in zip(command, [*command[1:], ""], strict=True):
        name, _, value = option.partition("=")
        if name in _MEETING:
            places.append(value or after)
    hosts = [_host(place) for place in places]
    return next((host for host in hosts if not is_of_this_machine(host)), "")


def _host(place: str) -> str:
    if place.startswith("["):
        return place[1:].partition("]")[0]
    return place.partition(":")[0] if place.count(":") == 1 else place
