"""The list of the jobs that were sent from here.

Each change of a job adds a line of JSON to the file. The key of a job is written before the job is
sent. If no answer comes, the cluster is asked for the key, so that one job is never sent twice.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO

from flatout.atomic_file import private
from flatout.errors import SubmitError

SENDING, SENT, REFUSED = "sending", "sent", "refused"


@dataclass(frozen=True)
class Entry:
    """A job as it was sent.

    Attributes:
        key: a unique text that travels with the job.
        target: the kind of cluster.
        name: the name of the job.
        folder: the absolute folder of its artifacts.
        when: the time of sending in UTC (ISO 8601).
        status: "sending" until there is an answer, then "sent" or "refused".
        id: the cluster's id of the job; "" before the answer.
        nodes: the number of nodes.
        price, currency: the price of a node and hour; None where the user gave none.
    """

    key: str
    target: str
    name: str
    folder: str
    when: str
    status: str = SENDING
    id: str = ""
    nodes: int = 1
    price: float | None = None
    currency: str = ""


class Ledger:
    """The file of the user, or another one; several processes may use it at once."""

    def __init__(self, path: Path | None = None) -> None:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self.path = path or Path(base) / "flatout" / "jobs.jsonl"

    def write(self, entry: Entry) -> None:
        """Add a change of a job, and flush it to the disk.

        Raises:
            SubmitError: the file cannot be written, so nothing may be sent.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked("a+", fcntl.LOCK_EX) as file:
                # If a full disk has cut off the last line, this entry begins a new one.
                file.write(f"{_missing_newline(file)}{json.dumps(asdict(entry))}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SubmitError(
                f"the list of sent jobs cannot be written: {error.strerror}; nothing was sent",
                where=str(self.path),
                do="set XDG_STATE_HOME to a folder that can be written",
            ) from error

    def entries(self) -> list[Entry]:
        """Return all jobs, the oldest first, each as it was last written."""
        entries: dict[str, Entry] = {}
        names = {item.name for item in fields(Entry)}
        try:
            with self._locked("r", fcntl.LOCK_SH) as file:
                lines = file.readlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                data = json.loads(line)
                entry = Entry(**{k: v for k, v in data.items() if k in names})
            except (ValueError, TypeError, AttributeError):  # torn by a full disk
                continue
            entries[entry.key] = entry
        return list(entries.values())

    def find(self, which: str) -> Entry:
        """Return the newest job of this id, name or key."""
        entries = self.entries()
        of_array = which.partition("_")[0]
        for entry in reversed(entries):
            if which in (entry.id, entry.name, entry.key) and which:
                return entry
        for entry in reversed(entries):
            if of_array == entry.id and of_array:
                return replace(entry, id=which)
        known = [entry.id or entry.name for entry in entries[-5:]]
        raise SubmitError(
            f"no job {which!r} was sent from here",
            where=str(self.path),
            do=f"flatout jobs lists them; the last are {', '.join(known)}" if known else None,
        )

    @contextmanager
    def _locked(self, mode: str, how: int) -> Iterator[IO[str]]:
        # Bytes that are no UTF-8 spoil only their own line.
        with open(
            self.path, mode, encoding="utf-8", errors="surrogateescape", opener=private
        ) as file:
            fcntl.flock(file, how)
            yield file


def _missing_newline(file: IO[str]) -> str:
    size = os.fstat(file.fileno()).st_size
    return "\n" if size and os.pread(file.fileno(), 1, size - 1) != b"\n" else ""
