"""Hosts on one machine: network namespaces with links of a given rate and delay.

    with lab(3, mbit=1000, delay_ms=0.5) as hosts:
        subprocess.run([*on_host(hosts[0]), "ip", "addr"])

What each host sends, and what it receives, is held to the rate; it comes after the delay, so that a
message takes twice the delay there and back. Without a delay the hosts are on a bridge, and the
kernel's tbf holds them to the rate; with one `delayed_links.py` carries each packet, as not every
kernel has netem. Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from two_nodes import LINK, on_node, why_not

__all__ = ["Host", "lab", "on_host", "why_not"]

_NETWORK = "10.79.0"


class Host(NamedTuple):
    """One of them: the name of its namespace, which is its host name too, and its address."""

    name: str
    address: str


def on_host(host: Host) -> list[str]:
    """What begins a command that is to run on a host, and to end with the one who started it."""
    rename = f'hostname {host.name}; exec "$@"'
    return [*on_node(host.name), "unshare", "-u", "sh", "-c", rename, "sh"]


@contextmanager
def lab(count: int, mbit: float, delay_ms: float = 0.0) -> Iterator[list[Host]]:
    """So many hosts; afterwards they are gone, and their links with them.

    Args:
        count: how many.
        mbit: Mbit/s that each sends at most, and receives.
        delay_ms: of what each sends.
    """
    own = f"flatout-lab-{os.getpid()}"
    hosts = [Host(f"{own}-{n}", f"{_NETWORK}.{n + 1}") for n in range(count)]
    links = _delayed(hosts, mbit, delay_ms) if delay_ms else _bridged(hosts, mbit)
    try:
        for name, _ in hosts:
            _call("ip", "netns", "add", name)
        with links:
            yield hosts
    finally:
        for name, _ in hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def _bridged(hosts: Sequence[Host], mbit: float) -> Iterator[None]:
    bridge = f"fl{os.getpid()}"
    try:
        _call("ip", "link", "add", bridge, "type", "bridge")
        _call("ip", "link", "set", bridge, "up")
        for number, host in enumerate(hosts):
            cable = f"{bridge}v{number}"
            peer = ("type", "veth", "peer", LINK, "netns", host.name)
            _call("ip", "link", "add", cable, *peer)
            _call("ip", "link", "set", cable, "master", bridge, "up")
            _up(host)
            # What may go at once is what the link carries in a millisecond: a step that waits
            # saves up no more than that.
            burst = max(32_768, int(mbit * 125))
            rate = ("rate", f"{mbit}mbit", "burst", f"{burst}b", "latency", "100ms")
            _call("tc", "-n", host.name, "qdisc", "add", "dev", LINK, "root", "tbf", *rate)
            _call("tc", "qdisc", "add", "dev", cable, "root", "tbf", *rate)
        yield
    finally:
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


@contextmanager
def _delayed(hosts: Sequence[Host], mbit: float, delay_ms: float) -> Iterator[None]:
    command = [sys.executable, str(Path(__file__).with_name("delayed_links.py"))]
    command += ["--mbit", str(mbit), "--delay-ms", str(delay_ms)]
    command += [f"{host.name}={host.address}" for host in hosts]
    held = ["setpriv", "--pdeathsig", "KILL", *command]
    with subprocess.Popen(held, stdout=subprocess.PIPE, text=True) as carrier:
        try:
            assert carrier.stdout is not None
            if carrier.stdout.readline() != "ready\n":
                raise SystemExit("links with a delay need /dev/net/tun")
            for host in hosts:
                # Large packets, so that few are carried, each of half a millisecond at most.
                mtu = min(60_000, max(1_500, int(mbit * 60)))
                _call("ip", "-n", host.name, "link", "set", LINK, "mtu", str(mtu))
                _up(host)
            yield
        finally:
            carrier.kill()


def _up(host: Host) -> None:
    _call("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", LINK)
    for link in (LINK, "lo"):
        _call("ip", "-n", host.name, "link", "set", link, "up")


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
