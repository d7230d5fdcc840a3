"""Carries packets between network namespaces, each at a rate and after a delay.

    python bench/delayed_links.py --mbit 1000 --delay-ms 5 NAMESPACE=ADDRESS ...

What netem does, where the kernel has none: each namespace has a tun device, whose packets this
process reads. A packet leaves when those before it have left at the rate, and arrives after the
delay besides, when those before it have arrived at the rate, too; it is dropped where 100 ms of
others stand before it. It says "ready" when the links are
up, and runs until it is ended.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from two_nodes import LINK

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_QUEUED_S = 0.1
_MOST_BYTES = 65_536


@dataclass
class Link:
    """Of one namespace.

    Args:
        tun: what is sent there can be read of it, and what is written there arrives.
        sent: when all that it has sent has left, on the monotonic clock.
        received: when all that comes to it has arrived, but for the delay.
    """

    tun: int
    sent: float = 0.0
    received: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("hosts", nargs="+")
    asked = parser.parse_args()
    links: dict[bytes, Link] = {}
    for host in asked.hosts:
        name, address = host.split("=")
        links[socket.inet_aton(address)] = Link(tun_of(name))
    with suppress(PermissionError):  # without it packets come later where CPUs are busy
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    print("ready", flush=True)
    carry(links, asked.mbit * 1e6 / 8, asked.delay_ms / 1e3)


def tun_of(namespace: str) -> int:
    """Make the tun device of a namespace; the file stays of it wherever this process goes on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace", namespace)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", LINK.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def carry(links: dict[bytes, Link], bytes_per_s: float, delay: float) -> None:
    """Carry packets for ever."""
    by_tun = {link.tun: link for link in links.values()}
    on_the_way: list[tuple[float, int, int, bytes]] = []
    number = count()
    while True:
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, _, tun, packet = heapq.heappop(on_the_way)
            with suppress(BlockingIOError):
                os.write(tun, packet)
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for tun in select.select(by_tun, (), (), wait)[0]:
            link, now = by_tun[tun], time.monotonic()
            with suppress(BlockingIOError):
                packet = os.read(tun, _MOST_BYTES)
                # An IPv4 header has its destination there; others, such as IPv6, go nowhere.
                to = links.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if to is None or max(link.sent, to.received) - now > _QUEUED_S:
                    continue
                takes = len(packet) / bytes_per_s
                link.sent = max(now, link.sent) + takes
                to.received = max(link.sent, to.received + takes)
                heapq.heappush(on_the_way, (to.received + delay, next(number), to.tun, packet))


if __name__ == "__main__":
    sys.exit(main())
