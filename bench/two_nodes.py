"""Two nodes on one machine: network namespaces with a link of a given rate between them.

    with two_nodes(1000) as names:
        subprocess.run([*on_node(names[0]), "ip", "addr"])

Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.78.0.1", "10.78.0.2")
LINK = "eth0"


def why_not() -> str:
    """Why there can be no nodes here, or an empty text."""
    if os.geteuid() != 0:
        return "two nodes need root"
    missing = [tool for tool in ("ip", "tc", "nsenter", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"two nodes need {', '.join(missing)} (Debian's iproute2 and util-linux)"
    name = f"flatout-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def on_node(name: str) -> list[str]:
    """What begins a command that is to run on a node, and to end with the one who started it."""
    return ["nsenter", f"--net=/run/netns/{name}", "setpriv", "--pdeathsig", "KILL"]


@contextmanager
def two_nodes(mbit: int) -> Iterator[tuple[str, str]]:
    """The names of two namespaces; what is sent over their link is held to `mbit` Mbit/s each way.

    Afterwards they are gone, and the link with them.
    """
    first, second = (f"flatout-bench-{os.getpid()}-{number}" for number in (1, 2))
    try:
        for name in (first, second):
            _call("ip", "netns", "add", name)
        _call("ip", "-n", first, "link", "add", LINK, "type", "veth", "peer", LINK, "netns", second)
        for name, address in zip((first, second), ADDRESSES, strict=True):
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for link in (LINK, "lo"):
                _call("ip", "-n", name, "link", "set", link, "up")
            rate = ("rate", f"{mbit}mbit", "burst", "512kb", "latency", "100ms")
            _call("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", *rate)
        yield first, second
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
