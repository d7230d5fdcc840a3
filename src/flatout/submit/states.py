"""The states of a job, in one vocabulary for all clusters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What has become of a job."""

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
    """What a cluster says of a job.

    Attributes:
        state: in the one vocabulary.
        words: what the cluster itself calls it, and why, such as "PENDING (Resources)".
        exit_code: of a job that has ended, where it is known.
        nodes: which it runs on.
        since_s: for how long it has run, in seconds.
        paid_s: for how long each of its nodes was taken, over all its starts and runs, in seconds;
            None where that is `since_s`.
        left_s: how long it will still take, in seconds, as the run itself has told.
        eta: the same in words.
        starts: how often it was started.
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
