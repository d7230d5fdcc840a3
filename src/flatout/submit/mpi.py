"""mpirun and a hostfile: an agent on each host, which starts and watches the ranks there.

mpirun is started on this machine and connects to the hosts. They must see the job's folder.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flatout import __version__
from flatout.errors import SubmitError
from flatout.measure import SUBMITTED
from flatout.submit import detached, shell
from flatout.submit.client import Answer, ask
from flatout.submit.hosts import address_of, hosts_of, problems_of
from flatout.submit.job import Job
from flatout.submit.send import KEY, facts_in, top_words
from flatout.submit.shared import follow_file, output_of_nodes, unseen
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

SCRIPT, HOSTFILE, NAME = "job.sh", "hostfile", "job"
OPTIONS = ("hosts", "port", "kind", "mpirun", "bin")
_KINDS = ("openmpi", "mpich")


class _Mpi:
    """Starts mpirun here, apart from the terminal."""

    name = "mpi"
    takes_seeds = True

    def artifacts(self, job: Job) -> list[Artifact]:
        refuse(_problems(job), where="flatout submit mpi")
        return [
            Artifact(SCRIPT, script(job), 0o700),
            Artifact(HOSTFILE, "".join(f"{line}\n" for line in _hostfile(job))),
        ]

    def unseen(self, job: Job) -> list[str]:
        return unseen(job)

    def check(self, job: Job) -> list[str]:
        missing = [item for item in ("bash", "setsid", "flock") if shutil.which(item) is None]
        program = _program(job.options)
        answer = ask([program, "--version"])
        kind = "mpich" if "HYDRA" in answer.output else "openmpi"
        if answer.code != 0:
            missing.append(f"{program}: {answer.last_words}; Debian has openmpi-bin and mpich")
        elif kind != _kind(job.options):
            missing.append(f"{program} is {kind}; say --option kind={kind}")
        return missing

    def send(self, job: Job, key: str) -> SentJob:
        answer = _here(job.folder, detached.start(SCRIPT, NAME))
        if answer.code == 0:
            return SentJob(_id(job.folder, key), f"to {counted(job.nodes, 'host')}")
        if answer.code is None:
            raise UnknownOutcome(f"the shell does not answer: {answer.last_words}")
        raise NotSent(f"cannot be started: {answer.last_words}", where=str(job.folder))

    def find(self, key: str, folder: Path) -> SentJob | None:
        is_it = (folder / KEY).exists() and (folder / KEY).read_text() == key
        has_begun = (folder / f"{NAME}.begun").exists()
        return SentJob(_id(folder, key)) if is_it and has_begun else None

    def state(self, id: str, folder: Path) -> JobState:
        answer = _here(folder, detached.ask(NAME))
        if answer.code != 0:
            raise SubmitError(f"the job's folder does not answer: {answer.last_words}")
        return detached.state_of(answer.output)

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        path = folder / f"{NAME}.log"
        return follow_file(path, lambda: follow and not self.state(id, folder).state.is_final)

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        options = facts_in(folder)["options"]
        hosts = str(folder / HOSTFILE)
        return output_of_nodes(
            folder, top_words(folder, key), lambda nodes: _on_each_host(options, nodes, hosts)
        )

    def cancel(self, id: str, folder: Path) -> None:
        answer = _here(folder, detached.stop(NAME))
        if answer.code != 0:
            raise SubmitError(f"cannot be canceled: {answer.last_words}", where=str(folder))


TARGET = _Mpi()


def script(job: Job) -> str:
    lines = [
        "#!/bin/bash",
        f"# {job.name}: {job.size_words}. Written by Flatout {__version__}.",
        f"# Anywhere, once: bash {SCRIPT}",
        'cd "$(dirname "$0")" || exit 1',
        *detached.guard(NAME),
        "",
        *shell.environment(job),
        "# The nodes meet on the first host.",
        f"export MASTER_ADDR={shell.quoted(address_of(hosts_of(job)[0]))}",
        f"export MASTER_PORT={job.options.get('port', '29500')}",
        *shell.SECRET,
        "",
        *shell.unpacking(job),
        "",
        *shell.array("command", _command(job)),
        *detached.running(NAME),
    ]
    return "\n".join(lines) + "\n"


def _command(job: Job) -> list[str]:
    names = ["PATH", "FLATOUT_SECRET", "MASTER_ADDR", "MASTER_PORT", shell.REMAINING]
    names += [SUBMITTED, *job.environment]
    how = _on_each_host(job.options, job.nodes, f"../{HOSTFILE}", names)
    ranks = job.devices_option if job.ranks > 1 or job.is_auto else []
    command = job.command_with("--restarts", str(job.retries), *ranks)
    start = shell.words([*shell.limited(job), *how])
    words = shell.words(command)
    if ":" not in job.arguments:
        return [*start, *words]
    # mpirun takes a lone : for its own, so the command goes through bash.
    return [*start, "bash", "-c", shell.quoted(f"exec {' '.join(words)}")]


def _on_each_host(
    options: Mapping[str, str], nodes: int, hosts: str, names: Sequence[str] = ()
) -> list[str]:
    if _kind(options) == "openmpi":
        given = [part for name in names for part in ("-x", name)]
        how = ["-np", str(nodes), "--hostfile", hosts, "--map-by", "ppr:1:node"]
        return [_program(options), *how, "--bind-to", "none", *given]
    given = ["-genvlist", ",".join(names)] if names else []
    return [_program(options), "-n", str(nodes), "-f", hosts, "-ppn", "1", *given]


def _hostfile(job: Job) -> list[str]:
    hosts = hosts_of(job)
    if _kind(job.options) == "openmpi":
        return [f"{host} slots={job.devices}" for host in hosts]
    return [f"{host}:{job.devices}" for host in hosts]


def _problems(job: Job) -> list[str]:
    options_of(job, OPTIONS)
    problems = problems_of(job)
    if _kind(job.options) not in _KINDS:
        problems.append(f"expected --option kind=openmpi or mpich, found {_kind(job.options)!r}")
    port = job.options.get("port", "1")
    if not is_port(port):
        problems.append(f"expected --option port=NUMBER, found {port!r}")
    return problems


def _kind(options: Mapping[str, str]) -> str:
    return options.get("kind", "openmpi")


def _program(options: Mapping[str, str]) -> str:
    return options.get("mpirun", "mpirun")


def _id(folder: Path, key: str) -> str:
    return f"{folder.name}-{key[:4]}"


def _here(folder: Path, command: str) -> Answer:
    return ask(["sh", "-c", f"cd {shlex.quote(os.fspath(folder))} && {{ {command}; }}"])
