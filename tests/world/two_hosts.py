"""Two hosts on one machine: network namespaces with a cable between them."""

import os
import shutil
import subprocess

ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*command):
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


def cannot_be_made():
    """Why there can be no hosts here; "" where there can."""
    for name in ("ip", "nsenter"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    try:
        with Hosts():
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"


class Hosts:
    """Use as a context; `before[n]` stands before a command that runs on host n."""

    def __init__(self):
        self.names = [f"flatout-{os.getpid()}-{n}" for n in (0, 1)]
        self.before = [("nsenter", f"--net=/run/netns/{name}") for name in self.names]

    def __enter__(self):
        try:
            for name in self.names:
                ip("netns", "add", name)
            one, two = self.names
            ip(*("link", "add", "eth0", "netns", one, "type", "veth"),
               *("peer", "name", "eth0", "netns", two))  # fmt: skip
            for name, address in zip(self.names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def cut(self):
        """Pull the cable out of the first host."""
        ip("-n", self.names[0], "link", "set", "eth0", "down")

    def slow(self, rate):
        """Let each host send so much a second, such as "1mbit"."""
        for before in self.before:
            command = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate]
            command += ["burst", "4kb", "latency", "400ms"]
            subprocess.run([*before, *command], check=True, capture_output=True, text=True)

    def mend(self):
        """Put it in again."""
        ip("-n", self.names[0], "link", "set", "eth0", "up")

    def __exit__(self, *error):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
