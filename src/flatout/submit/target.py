"""The questions to each kind of cluster, and their answers; a file of this folder per kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Protocol

from flatout.atomic_file import atomic_write
from flatout.errors import SubmitError
from flatout.submit.job import Job
from flatout.submit.targets import TARGETS


class State(StrEnum):
    """The state of a job, in one vocabulary for all clusters."""

    queued = "queued"
    starting = "starting"
    running = "running"
    stopping = "stopping"
    requeued = "requeued"
    succeeded = "succeeded"
    failed = "failed"
    canceled = "canceled"
    ended = "ended"
    lost = "lost"

    @property
    def is_final(self) -> bool:
        """True if no other state follows.

        The cluster does not report how an `ended` job ended. It does not know a `lost` job.
        """
        return self in (State.succeeded, State.failed, State.canceled, State.ended, State.lost)


@dataclass(frozen=True)
class JobState:
    """A cluster's report of a job.

    Attributes:
        state: the state in the common vocabulary.
        words: the cluster's own name of the state with its reason, such as "PENDING (Resources)".
        exit_code: the exit code of a job that has ended, or None if unknown.
        nodes: names of the job's nodes.
        since_s: seconds for which the job has run.
        paid_s: seconds for which each node was taken, over all starts; None if that is `since_s`.
        left_s: remaining seconds of the job, as the run itself reports them.
        eta: the same in words.
        starts: number of starts.
    """

    state: State
    words: str = ""
    exit_code: int | None = None
    nodes: tuple[str, ...] = ()
    since_s: float | None = None
    paid_s: float | None = None
    left_s: float | None = None
    eta: str = ""
    starts: int = 1


@dataclass(frozen=True)
class Artifact:
    """A file of a job's folder, which a person can read before anything is sent.

    Args:
        text: its content. Odd bytes of paths and arguments are surrogates, as in `os.fsdecode`.
    """

    name: str
    text: str
    mode: int = 0o600

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self.text.splitlines())

    def write(self, folder: Path) -> None:
        """Write the whole file into a folder, or nothing."""
        with atomic_write(folder / self.name, "wb") as file:
            os.fchmod(file.fileno(), self.mode)
            file.write(os.fsencode(self.text))


@dataclass(frozen=True)
class SentJob:
    """A job that a cluster has taken: the cluster's id, and words for people."""

    id: str
    words: str = ""


class NotSent(SubmitError):
    """The cluster has certainly not taken the job: it can be sent again."""


class UnknownOutcome(SubmitError):
    """The cluster may have taken the job: Flatout looks for it, and never sends it again."""


class Target(Protocol):
    """A kind of cluster.

    A sent job carries `key`, by which the cluster is asked for the job if no answer came.
    """

    name: str
    takes_seeds: bool
    """True if one job runs once for each seed, or is refused. Else each seed has its own job."""

    def artifacts(self, job: Job) -> list[Artifact]:
        """Return the files that make the job, validated without a client or a network.

        Raises:
            SubmitError: the cluster would not take them, with all that is wrong.
        """

    def unseen(self, job: Job) -> list[str]:
        """Return the paths that the job needs and no node would find, each with advice."""

    def check(self, job: Job) -> list[str]:
        """Ask before sending; return all that the cluster would refuse: partition, role, ...

        The artifacts are in `job.folder`.

        Raises:
            SubmitError: the client is not installed, or the cluster does not answer.
        """

    def send(self, job: Job, key: str) -> SentJob:
        """Send the job's folder once.

        Raises:
            NotSent: it was refused, or the cluster was never reached.
            UnknownOutcome: the cluster may have it.
        """

    def find(self, key: str, folder: Path) -> SentJob | None:
        """Return the job with this key, or None if the cluster does not know it."""

    def state(self, id: str, folder: Path) -> JobState:
        """Return the state of a job."""

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """Yield a job's output in pieces with their line ends; with `follow` until it ends."""

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        """Return the output of `flatout top --json` on each node of a running job.

        Raises:
            SubmitError: its nodes cannot be asked from here.
        """

    def cancel(self, id: str, folder: Path) -> None:
        """Stop a job, and keep it from starting again."""


def target_of(name: str) -> Target:
    """Return the target of a name."""
    if name not in TARGETS:
        raise SubmitError(f"expected one of {', '.join(TARGETS)}; found {name!r}")
    made: Target = import_module(f"flatout.submit.{name}").TARGET
    return made


def options_of(job: Job, known: Sequence[str]) -> dict[str, str]:
    """Return a job's options of its target; refuse unknown ones."""
    unknown = sorted(set(job.options) - set(known))
    if unknown:
        raise SubmitError(
            f"expected --option of {', '.join(sorted(known))}; found {', '.join(unknown)}"
        )
    return dict(job.options)


def refuse(problems: Sequence[str], where: str, do: str | None = None) -> None:
    """Raise a SubmitError that names all problems, if there are any."""
    if problems:
        raise SubmitError("\n  ".join(problems), where=where, do=do)
