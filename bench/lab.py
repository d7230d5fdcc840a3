"""Hosts on one machine: network namespaces on a bridge, with links of a given rate and delay.

    with lab(3, mbit=1000, delay_ms=0.5) as hosts:
        subprocess.run([*on_host(hosts[0]), "ip", "addr"])

What each host sends is held to the rate and comes after the delay, so that a message takes twice
the delay there and back. Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from two_nodes import LINK, on_node, why_not

__all__ = ["Host", "can_delay", "lab", "on_host", "why_not"]

_NETWORK = "10.79.0"


class Host(NamedTuple):
    """One of them: the name of its namespace, which is its host name too, and its address."""

    name: str
    address: str


def on_host(host: Host) -> list[str]:
    """What begins a command that is to run on a host, and to end with the one who started it."""
    rename = f'hostname {host.name}; exec "$@"'
    return [*on_node(host.name), "unshare", "-u", "sh", "-c", rename, "sh"]


def can_delay() -> bool:
    """Whether this kernel has netem, which delays what is sent."""
    name, cable = f"flatout-try-{os.getpid()}", ("type", "veth", "peer", "name", "b")
    try:
        _call("ip", "netns", "add", name)
        _call("ip", "-n", name, "link", "add", "a", *cable)
        _call("tc", "-n", name, "qdisc", "add", "dev", "a", "root", "netem", "delay", "1ms")
    except SystemExit:
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return True


@contextmanager
def lab(count: int, mbit: float, delay_ms: float = 0.0) -> Iterator[list[Host]]:
    """So many hosts; afterwards they are gone, and their links with them.

    Args:
        count: how many.
        mbit: Mbit/s that each sends at most.
        delay_ms: of what each sends; above 0 where `can_delay`.
    """
    own = f"flatout-lab-{os.getpid()}"
    bridge = f"fl{os.getpid()}"
    hosts = [Host(f"{own}-{n}", f"{_NETWORK}.{n + 1}") for n in range(count)]
    try:
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "link", "set", bridge, "up")
        for number, (name, address) in enumerate(hosts):
            _call("ip", "netns", "add", name)
            cable = f"{bridge}v{number}"
            _call(*("ip", "link", "add", cable, "type", "veth", "peer", LINK, "netns", name))
            _call("ip", "link", "set", cable, "master", bridge, "up")
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for link in (LINK, "lo"):
                _call("ip", "-n", name, "link", "set", link, "up")
            at = ("tc", "-n", name, "qdisc", "add", "dev", LINK)
            # What may go at once is what the link carries in a millisecond: a step that waits
            # saves up no more than that.
            burst = max(32_768, int(mbit * 125))
            rate = ("rate", f"{mbit}mbit", "burst", f"{burst}b", "latency", "100ms")
            _call(*at, "root", "handle", "1:", "tbf", *rate)
            if delay_ms:
                # Its queue takes what the delay keeps on its way.
                delay = ("delay", f"{delay_ms}ms", "limit", "100000")
                _call(*at, "parent", "1:1", "netem", *delay)
        yield hosts
    finally:
        for name, _ in hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
