"""The states, output, exit codes and lanes of jobs that were sent."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from flatout.errors import FlatoutError, SubmitError
from flatout.report import Sample, Top, together
from flatout.submit.ledger import REFUSED, SENDING, Entry, Ledger
from flatout.submit.price import Cost, Price
from flatout.submit.send import settle
from flatout.submit.target import JobState, State, target_of
from flatout.words import duration

_RECENT = timedelta(days=7)
_LAST_LINES = 15
# The least seconds between two samples: each starts a process on each node.
_LEAST_S = 3.0


@dataclass(frozen=True)
class JobStatus:
    """A job and its cluster's report of it."""

    entry: Entry
    state: JobState | None
    trouble: str = ""

    @property
    def cost(self) -> Cost | None:
        """The cost so far and to come; None without a price or a running time."""
        entry, state = self.entry, self.state
        if entry.price is None or state is None:
            return None
        paid = state.since_s if state.paid_s is None else state.paid_s
        if paid is None:
            return None
        price = Price(entry.price, entry.currency)
        left = 0.0 if state.state.is_final else state.left_s
        to_come = None if left is None else price.of(entry.nodes, left)
        return Cost(price, price.of(entry.nodes, paid), to_come)

    def row(self) -> tuple[str, ...]:
        """Return cells for a table: job, target, state, running time, and other words."""
        entry, state = self.entry, self.state
        # On clusters other than SLURM the id contains the name.
        name = "" if entry.name in entry.id else entry.name
        if state is None:
            rest = " · ".join(filter(None, (name, self.trouble)))
            return (entry.id or "?", entry.target, "?", "", rest)
        code = "" if state.exit_code in (None, 0) else f" ({state.exit_code})"
        ran = "" if not state.since_s else duration(state.since_s)
        starts = f"start {state.starts}" if state.starts > 1 else ""
        eta = f"ends in {state.eta}" if state.eta and not state.state.is_final else ""
        cost = "" if self.cost is None else str(self.cost)
        nodes = ", ".join(state.nodes)
        rest = " · ".join(filter(None, (name, nodes, state.words, starts, eta, cost)))
        return (entry.id, entry.target, f"{state.state}{code}", ran, rest)

    def as_dict(self) -> dict[str, Any]:
        entry, state = self.entry, self.state
        data: dict[str, Any] = {
            "id": entry.id,
            "target": entry.target,
            "name": entry.name,
            "folder": entry.folder,
            "sent": entry.when,
            "state": None if state is None else str(state.state),
        }
        if state is not None:
            data |= {
                "words": state.words,
                "exit_code": state.exit_code,
                "nodes": list(state.nodes),
                "seconds": state.since_s,
                "eta": state.eta,
                "starts": state.starts,
            }
        if self.cost is not None:
            data["cost"] = {
                "currency": self.cost.price.currency,
                "so_far": self.cost.so_far,
                "to_come": self.cost.to_come,
            }
        return data | ({"trouble": self.trouble} if self.trouble else {})

    def last_words(self) -> list[str]:
        """Return the traceback of the rank that failed, or the last lines of a bad end."""
        if self.state is None or self.state.state not in (State.failed, State.ended, State.lost):
            return []
        try:
            text = "".join(_target_logs(self.entry, follow=False))
        except SubmitError:
            return []
        return _of_the_first(text.splitlines())


def _of_the_first(lines: list[str]) -> list[str]:
    first = next((n for n, item in enumerate(lines) if " has failed:" in item), None)
    if first is None:
        first = next((n for n, item in enumerate(lines) if "Traceback (most recent" in item), None)
    if first is None:
        return lines[-_LAST_LINES:]
    # Each line of several ranks begins with its rank, and may be followed by lines of other ranks.
    before, result, _ = lines[first].partition("flatout: ")
    own = [line for line in lines[first:] if line.startswith(before)] if result else lines[first:]
    after = (n for n in range(1, len(own)) if own[n].startswith(f"{before}flatout: "))
    cause = own[: next(after, len(own))]
    return cause if len(cause) <= _LAST_LINES else [cause[0], "  …", *cause[-_LAST_LINES:]]


def recent(*, everything: bool = False, ledger: Ledger | None = None) -> list[JobStatus]:
    """Return the jobs of the last week, or all, the newest last; ask all clusters at once."""
    ledger = ledger or Ledger()
    since = datetime.now(UTC) - _RECENT
    entries = [
        entry
        for entry in ledger.entries()
        if entry.status != REFUSED and (everything or datetime.fromisoformat(entry.when) > since)
    ]
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda value: _status_of(value, ledger), entries))


def look(which: str, ledger: Ledger | None = None) -> JobStatus:
    """Return one job.

    Raises:
        SubmitError: no job of this id or name was sent from here.
    """
    ledger = ledger or Ledger()
    return _status_of(ledger.find(which), ledger)


def _status_of(entry: Entry, ledger: Ledger) -> JobStatus:
    try:
        to = target_of(entry.target)
        entry = settle(entry, to, ledger)
        if entry.status == SENDING:
            return JobStatus(entry, None, "sent without an answer; the cluster does not know it")
        if entry.status == REFUSED:
            return JobStatus(entry, None, "refused, so it was not sent")
        return JobStatus(entry, to.state(entry.id, Path(entry.folder)))
    except FlatoutError as error:
        is_there = os.path.isdir(entry.folder)
        return JobStatus(entry, None, error.what if is_there else f"{entry.folder} is gone")


def logs_of(which: str, *, follow: bool) -> Iterator[str]:
    """Yield a job's output.

    Raises:
        SubmitError: no job of this id or name was sent from here, or it has printed nothing.
    """
    return _target_logs(Ledger().find(which), follow=follow)


def _target_logs(entry: Entry, *, follow: bool) -> Iterator[str]:
    return target_of(entry.target).logs(entry.id, Path(entry.folder), follow=follow)


def exit_code(which: str) -> int:
    """Return a job's exit code; without one 0 or 1 by its state."""
    state = look(which).state
    if state is None:
        return 1
    if state.exit_code is not None:
        return state.exit_code
    return 0 if state.state is State.succeeded else 1


class TopOfJob(Top):
    """A Top of the nodes of a job that was sent."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self._entry = entry
        self._target = target_of(entry.target)

    def sample(self) -> Sample:
        """Ask all nodes, which takes some seconds."""
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
        """Wait long enough to be no load for the nodes."""
        time.sleep(max(seconds, _LEAST_S))

    def check(self, sample: Sample) -> None:
        """Refuse a sample without ranks."""
        if not sample.jobs:
            raise SubmitError(
                "none of its ranks shows its lanes yet, or any more",
                where=self._entry.id,
                do=f"flatout jobs {self._entry.id} says what has become of it; flatout.Trainer, "
                "flatout.Loop and flatout.integrations show them",
            )


def top_of(which: str) -> TopOfJob | None:
    """Return a running job, or None if no job of this id or name was sent from here.

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
