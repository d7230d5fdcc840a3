"""The list of hosts that a user gives if no cluster knows them."""

from __future__ import annotations

import os
import re
import shutil

from flatout.errors import SubmitError
from flatout.submit.client import ask
from flatout.submit.job import Job
from flatout.words import counted

_HOST = re.compile(r"(?:[\w.-]+@)?[\w\[\]][\w.:\[\]-]*")


def hosts_of(job: Job) -> list[str]:
    """Return the hosts of a job: "host1,me@host2", or a file with one in each line."""
    given = job.options.get("hosts", "")
    path = job.root / given
    if "," not in given and given and os.path.isfile(path):
        try:
            lines = path.read_text().splitlines()
        except (OSError, ValueError) as error:
            raise SubmitError(f"the list of hosts cannot be read: {error}", where=given) from error
        return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    return [item.strip() for item in given.split(",") if item.strip()]


def problems_of(job: Job) -> list[str]:
    hosts = hosts_of(job)
    problems = [
        f"expected a host, found {problems!r}"
        for problems in hosts
        if _HOST.fullmatch(problems) is None
    ]
    if not hosts:
        problems.append("no hosts: say --option hosts=host1,host2, or a file with one in each line")
    elif len(hosts) != job.nodes:
        problems.append(f"--nodes {job.nodes}, but {counted(len(hosts), 'host')} are listed")
    if len(set(hosts)) < len(hosts):
        problems.append("a host is listed twice")
    if job.seeds:
        problems.append("--seeds needs a cluster that has a queue")
    return problems


def address_of(host: str, config: str | None = None) -> str:
    if shutil.which("ssh") is not None:
        answer = ask(["ssh", *config_words(config), "-G", "--", host])
        for line in answer.output.splitlines():
            if line.startswith("hostname "):
                return line.removeprefix("hostname ")
    return host.rpartition("@")[2]


def config_words(path: str | None) -> list[str]:
    return [] if path is None else ["-F", path]
