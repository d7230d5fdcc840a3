"""What each kind of cluster is asked: a file of this folder for each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from flatout.errors import SubmitError
from flatout.submit.artifact import Artifact
from flatout.submit.job import Job
from flatout.submit.states import JobState
from flatout.submit.targets import TARGETS


@dataclass(frozen=True)
class SentJob:
    """A job that a cluster has taken.

    Attributes:
        id: what the cluster calls it.
        words: what it said, for people.
    """

    id: str
    words: str = ""


class NotSent(SubmitError):
    """The cluster has surely not taken the job: it can be sent again."""


class UnknownOutcome(SubmitError):
    """No one knows whether the cluster has taken the job: it is looked for, never sent again."""


class Target(Protocol):
    """A kind of cluster.

    What is sent carries `key`, by which the cluster is asked for it where no answer came.
    """

    name: str
    takes_seeds: bool
    """Whether one job runs once for each seed, or is refused; else there is one job for each."""

    def artifacts(self, job: Job) -> list[Artifact]:
        """The files that make the job, validated; needs no client and no network.

        Raises:
            SubmitError: the cluster would not take them, with all that is wrong.
        """

    def unseen(self, job: Job) -> list[str]:
        """What no node would find of what the job needs, each with what to do."""

    def check(self, job: Job) -> list[str]:
        """What the cluster would refuse, asked before anything is sent: partition, role, ...

        The artifacts lie in `job.folder` by then.

        Raises:
            SubmitError: the client is not installed, or the cluster does not answer.
        """

    def send(self, job: Job, key: str) -> SentJob:
        """Send what lies in the job's folder, once.

        Raises:
            NotSent: it was refused, or the cluster was never reached.
            UnknownOutcome: it may have come.
        """

    def find(self, key: str, folder: Path) -> SentJob | None:
        """The job that was sent with a key; None where the cluster does not know it."""

    def state(self, id: str, folder: Path) -> JobState:
        """What has become of a job."""

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        """What a job has printed, in pieces with their line ends; with `follow` until it ends."""

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        """What `flatout top --json` prints on each node of a job that runs.

        Raises:
            SubmitError: its nodes cannot be looked into from here; with what works instead.
        """

    def cancel(self, id: str, folder: Path) -> None:
        """Stop a job, and keep it from starting again."""


def target_of(name: str) -> Target:
    """The target of a name.

    Raises:
        SubmitError: there is none.
    """
    if name not in TARGETS:
        raise SubmitError(f"expected one of {', '.join(TARGETS)}; found {name!r}")
    made: Target = import_module(f"flatout.submit.{name}").TARGET
    return made


def options_of(job: Job, known: Sequence[str]) -> dict[str, str]:
    """A job's own options of its target."""
    unknown = sorted(set(job.options) - set(known))
    if unknown:
        raise SubmitError(
            f"expected --option of {', '.join(sorted(known))}; found {', '.join(unknown)}"
        )
    return dict(job.options)
