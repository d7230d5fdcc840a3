"""A list of hosts, by OpenSSH: the code is copied there, and each host runs its node of the job.

Only the user's own `ssh` is called, with its keys, agents and jump hosts. The job's folder on the
hosts is a copy of the one here, with the files of detached.py.
"""

from __future__ import annotations

import glob
import io
import secrets
import shlex
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flatout import __version__
from flatout.errors import SubmitError
from flatout.submit import detached, shell
from flatout.submit.client import Answer, ask, merged, require_program
from flatout.submit.hosts import address_of, config_words, hosts_of, problems_of
from flatout.submit.job import Job
from flatout.submit.send import facts_in, top_words
from flatout.submit.target import (
    Artifact,
    JobState,
    NotSent,
    SentJob,
    UnknownOutcome,
    options_of,
    refuse,
)
from flatout.words import counted
from flatout.world import is_port

SCRIPT, HOSTS, THERE = "node.sh", "hosts", "there"
OPTIONS = ("hosts", "rendezvous", "folder", "config", "bin")
_PORT = 29500
_NAME = "node-{}"
# OpenSSH's own exit code if it found no connection.
_BROKEN = 255
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-T")


class _Ssh:
    """Starts a node of the job on each host."""

    name = "ssh"
    takes_seeds = True

    def artifacts(self, job: Job) -> list[Artifact]:
        refuse(_problems(job), where="flatout submit ssh")
        return [
            Artifact(SCRIPT, script(job), 0o700),
            Artifact(HOSTS, "\n".join(hosts_of(job)) + "\n"),
        ]

    def unseen(self, job: Job) -> list[str]:
        return []

    def check(self, job: Job) -> list[str]:
        require_program("ssh", "OpenSSH's client, Debian's openssh-client")
        way = _way(job)
        answers = way.each(lambda node: _lacks(job))
        result = [
            f"{host}: {line}"
            for host, value in answers.items()
            for line in (value.output.splitlines() if value.code == 0 else [value.last_words])
        ]
        return result or _not_shared(job, way)

    def send(self, job: Job, key: str) -> SentJob:
        require_program("ssh", "OpenSSH's client, Debian's openssh-client")
        way = _way(job, key)
        (job.folder / THERE).write_text(f"{way.there}\n")
        folder = shlex.quote(way.there)
        receive = f"mkdir -p -- {folder} && chmod 700 {folder} && tar -xf - -C {folder}"
        failed = _failed(way.each(lambda node: receive, _packed(job)))
        if failed:
            raise NotSent("the job could not be copied:\n  " + "\n  ".join(failed))
        secret = f"{secrets.token_hex(32)}\n".encode()
        failed = _failed(way.inside(lambda name: detached.start(SCRIPT, name), secret))
        if not failed:
            return SentJob(_id(job.name, key), f"to {counted(len(way.hosts), 'host')}")
        words = "the job could not be started:\n  " + "\n  ".join(failed)
        if _failed(way.inside(detached.stop)):
            raise UnknownOutcome(words)
        raise NotSent(words)

    def find(self, key: str, folder: Path) -> SentJob | None:
        way = _SshRoute.read(folder)
        if any(state.words == detached.ABSENT for state in way.states().values()):
            return None
        return SentJob(_id(way.name, key))

    def state(self, id: str, folder: Path) -> JobState:
        return detached.together(_SshRoute.read(folder).states())

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        return _SshRoute.read(folder).logs(follow)

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        command = shlex.join(top_words(folder, key))
        answers = _SshRoute.read(folder).each(lambda node: command)
        refuse(_failed(answers), where=id)
        return [answer.output for answer in answers.values()]

    def cancel(self, id: str, folder: Path) -> None:
        refuse(_failed(_SshRoute.read(folder).inside(detached.stop)), where=id)


def _id(name: str, key: str) -> str:
    return f"{name}-{key[:4]}"


TARGET = _Ssh()


def script(job: Job) -> str:
    """Return the script of each host; its argument is the number of the node."""
    name = _NAME.format('"$node"')
    lines = [
        "#!/bin/bash",
        f"# {job.name}: node $1; {job.size_words}. Written by Flatout {__version__}.",
        f"# On each host, in the job's folder: bash {SCRIPT} NODE, counted from 0, with the same",
        "# secret in a line on stdin, so that it is in no file and in no list of processes.",
        "node=$1",
        'cd "$(dirname "$0")" || exit 1',
        *detached.guard(name),
        *(["IFS= read -r FLATOUT_SECRET", "export FLATOUT_SECRET"] if job.nodes > 1 else []),
        "",
        *shell.environment(job),
        "",
        *shell.unpacking(job),
        "",
        *shell.array("command", _command(job)),
        *detached.running(name),
    ]
    return "\n".join(lines) + "\n"


def _command(job: Job) -> list[str]:
    limit = shell.words(shell.limited(job))
    if job.is_command:
        return [*limit, *shell.words(job.command)]
    ranks = job.devices_option if job.ranks > 1 or job.is_auto else []
    program, run, *rest = shell.words(job.command_with("--restarts", str(job.retries), *ranks))
    node = []
    if job.nodes > 1:
        meeting = shell.quoted(rendezvous_of(job))
        node = ["--nodes", str(job.nodes), '--node-rank "$node"', "--rendezvous", meeting]
    return [*limit, program, run, *node, *rest]


def rendezvous_of(job: Job) -> str:
    given = job.options.get("rendezvous")
    return given or f"{address_of(hosts_of(job)[0], job.options.get('config'))}:{_PORT}"


def _problems(job: Job) -> list[str]:
    options_of(job, OPTIONS)
    problems = problems_of(job)
    if not problems:
        host, colon, port = rendezvous_of(job).rpartition(":")
        if not (host and colon and is_port(port)):
            given = job.options["rendezvous"]
            problems.append(f"expected --option rendezvous=HOST:PORT, found {given!r}")
    return problems


@dataclass(frozen=True)
class _SshRoute:
    """The connection to a job's hosts; `there` is its folder, relative to the user's home."""

    name: str
    hosts: list[str]
    there: str
    config: str | None

    @classmethod
    def read(cls, folder: Path) -> _SshRoute:
        facts = facts_in(folder)
        try:
            hosts = (folder / HOSTS).read_text().split()
            there = (folder / THERE).read_text().rstrip("\n")
        except (OSError, ValueError) as error:
            raise SubmitError(
                f"the job's folder is not as it was: {error}", where=str(folder)
            ) from error
        return cls(facts["name"], hosts, there, facts["options"].get("config"))

    def each(self, command: Callable[[int], str], stdin: bytes = b"") -> dict[str, Answer]:
        with ThreadPoolExecutor(32) as pool:
            result = pool.map(
                lambda value: ask([*self.to(value[1]), command(value[0])], stdin=stdin),
                enumerate(self.hosts),
            )
            return dict(zip(self.hosts, result, strict=True))

    def inside(self, command: Callable[[str], str], stdin: bytes = b"") -> dict[str, Answer]:
        at = f"cd {shlex.quote(self.there)} && "
        return self.each(lambda node: f"{at}{{ {command(_NAME.format(node))}; }}", stdin)

    def to(self, host: str) -> list[str]:
        return ["ssh", *config_words(self.config), *_OPTIONS, "--", host]

    def states(self) -> dict[str, JobState]:
        return {host: self._state(host, value) for host, value in self.inside(detached.ask).items()}

    def _state(self, host: str, answer: Answer) -> JobState:
        if answer.code in (None, _BROKEN):
            raise SubmitError(f"{host} does not answer: {answer.last_words}")
        return detached.state_of(answer.output if answer.code == 0 else "absent")

    def logs(self, follow: bool) -> Iterator[str]:
        return merged([self._lines(node, host, follow) for node, host in enumerate(self.hosts)])

    def _lines(self, node: int, host: str, follow: bool) -> Iterator[str]:
        before = f"[{host}] " if len(self.hosts) > 1 else ""
        name = _NAME.format(node)
        command = f"cd {shlex.quote(self.there)} && {detached.read(name, follow)}"
        with subprocess.Popen(
            [*self.to(host), command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as reading:
            assert reading.stdout is not None
            for line in reading.stdout:
                yield f"{before}{line}"


def _way(job: Job, key: str = "") -> _SshRoute:
    base = job.options.get("folder", ".flatout/jobs")
    return _SshRoute(job.name, hosts_of(job), f"{base}/{job.name}-{key}", job.options.get("config"))


def _failed(answers: dict[str, Answer]) -> list[str]:
    return [f"{host}: {value.last_words}" for host, value in answers.items() if value.code != 0]


def _packed(job: Job) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for path in sorted(job.folder.iterdir()):
            tar.add(path, path.name)
    return data.getvalue()


def _lacks(job: Job) -> str:
    bin = job.options.get("bin") or str(Path(sys.executable).parent)
    program = shlex.quote(f"{bin}/flatout")
    lines = [
        f"found=$({program} --version 2>/dev/null)",
        f'[ "$found" = "flatout {__version__}" ] || '
        f'echo "expected flatout {__version__} in "{shlex.quote(bin)}", found ${{found:-none}}; '
        'say --option bin=FOLDER"',
        "for one in bash tar setsid nohup flock; do "
        'command -v $one > /dev/null || echo "$one is not installed"; done',
    ]
    if job.nodes > 1:
        meeting = shlex.quote(rendezvous_of(job).rpartition(":")[0])
        lines.append(
            f"! command -v getent > /dev/null || getent ahosts {meeting} > /dev/null || "
            f"echo does not know {meeting}, where the nodes would meet: say --option "
            "rendezvous=ADDRESS:PORT"
        )
    for item in job.inputs:
        if not (item.is_url or item.travels):
            path = shlex.quote(item.path)
            pattern = f"compgen -G {path} > /dev/null" if glob.has_magic(item.path) else ""
            test = f"bash -c {shlex.quote(pattern)}" if pattern else f"[ -e {path} ]"
            lines.append(f"{test} || echo not there: {path}")
    return "; ".join(lines)


def _not_shared(job: Job, way: _SshRoute) -> list[str]:
    if job.checkpoint is None or "://" in job.checkpoint:
        return []
    folder = shlex.quote(job.checkpoint)
    token = uuid.uuid4().hex
    file = shlex.quote(f"{job.checkpoint}/.flatout-{token}")
    wrote = way.each(lambda node: f"mkdir -p -- {folder} && : > {file}" if node == 0 else ":")
    failed = _failed(wrote)
    if failed:
        return [f"--checkpoints {job.checkpoint} cannot be written: {failed[0]}"]
    result = way.each(lambda node: f"[ -e {file} ]")
    way.each(lambda node: f"rm -f -- {file}" if node == 0 else ":")
    return [
        f"{host} does not see what {way.hosts[0]} writes into --checkpoints {job.checkpoint}"
        for host, value in result.items()
        if value.code != 0
    ]
