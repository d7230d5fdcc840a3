"""`flatout top JOB`: what the ranks of a job that was sent do right now, on all its nodes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flatout.errors import SubmitError
from flatout.report import Sample, Top, together
from flatout.submit.ledger import Entry, Ledger
from flatout.submit.states import State
from flatout.submit.target import target_of
from flatout.submit.watch import look

# Each look starts a process on each node.
_LEAST_S = 3.0


class TopOfJob(Top):
    """As Top, by asking the nodes of a job.

    Args:
        entry: the job, which runs.
    """

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self._entry = entry
        self._target = target_of(entry.target)

    def sample(self) -> Sample:
        """Look now, which takes some seconds.

        Raises:
            SubmitError: the nodes cannot be looked into.
        """
        entry = self._entry
        processes = self._target.top(entry.id, Path(entry.folder), entry.key)
        try:
            return together([json.loads(item) for item in processes])
        except (ValueError, LookupError, TypeError) as error:
            raise SubmitError(
                f"expected what flatout top --json prints, found {error!r}",
                where=f"the nodes of {entry.id}",
                do="see that they have the same flatout as this machine",
            ) from error

    def wait(self, seconds: float) -> None:
        """Let time pass, so that looking is no load for the nodes."""
        time.sleep(max(seconds, _LEAST_S))

    def check(self, sample: Sample) -> None:
        """See that there is anything to show.

        Raises:
            SubmitError: no rank shows itself.
        """
        if not sample.jobs:
            raise SubmitError(
                "none of its ranks shows its lanes yet, or any more",
                where=self._entry.id,
                do=f"flatout jobs {self._entry.id} says what has become of it; flatout.Trainer, "
                "flatout.Loop and flatout.integrations show them",
            )


def top_of(which: str) -> TopOfJob | None:
    """A job that runs; None where none of that id or name was sent from here.

    Raises:
        SubmitError: it does not run.
    """
    try:
        entry = Ledger().find(which)
    except SubmitError:
        return None
    if which == entry.key:  # a node of the job asks for its own ranks
        return None
    result = look(which)
    if result.state is None:
        raise SubmitError(f"it cannot be looked at: {result.trouble}", where=which)
    if result.state.state not in (State.running, State.stopping):
        raise SubmitError(
            f"it is {result.state.state}, so there is nothing to see in its nodes",
            where=which,
            do=f"flatout jobs {which}, flatout logs {which}",
        )
    return TopOfJob(entry)
